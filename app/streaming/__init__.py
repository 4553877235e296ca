"""Tokens from workers to API processes: `TokenWriter` on the one side, `TokenReader` on the other.

One pub/sub channel per API process, one message per engine step, the same message in a capped replay stream. Batches
are numbered per worker incarnation and deltas per request attempt, so a hole shows and is filled, or ends the request
with an error.
"""

from app.streaming.reader import RequestStream, TokenReader
from app.streaming.writer import TokenWriter

__all__ = ["RequestStream", "TokenReader", "TokenWriter"]
