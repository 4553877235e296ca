"""A whole answer that is too large to be left to the server: vectors of thousands of inputs are a hundred megabytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from api.admission import Ticket
from api.disconnect import WhileConnected
from app.errors.serving import DeadlineExceeded

#: Smaller ones are handed to the server in one piece, whoever reads them.
LARGE = 1 << 20
PIECE = 1 << 18


def is_large(answer: Response) -> bool:
    return isinstance(answer, StreamingResponse) or len(answer.body) > LARGE


class LargeAnswer(Response):
    """Sends an answer as fast as its client reads it, and until the request's deadline (unix time) at most: so long it
    is in memory, and its request in flight."""

    def __init__(self, answer: Response, deadline: float, ticket: Ticket) -> None:
        self.status_code, self.raw_headers, self.background = answer.status_code, answer.raw_headers, None
        self._answer, self._deadline, self._ticket = answer, deadline, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "cancelled"
        try:
            async with asyncio.timeout(self._deadline - time.time()), WhileConnected(receive) as client:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for piece in _pieces(self._answer):
                    if client.left:
                        return
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                outcome = "ok"
        except TimeoutError:
            outcome = DeadlineExceeded.code  # the server closes the connection of an answer that has no end
        finally:
            self._ticket.close(outcome)


async def _pieces(answer: Response) -> AsyncIterator[bytes]:
    if isinstance(answer, StreamingResponse):
        async for piece in answer.body_iterator:
            yield piece.encode() if isinstance(piece, str) else bytes(piece)
        return
    for at in range(0, len(answer.body), PIECE):
        yield bytes(answer.body[at : at + PIECE])
