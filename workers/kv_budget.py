"""KV blocks promised to requests, so that a decode engine never has to preempt.

A preempted request is prefilled again, and a decode worker has no pixels to do that with: vLLM's engine would die. So a
request is given to the engine only when the blocks for its whole prompt and answer are free, and waits here otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from app.roles import Role
from app.settings import Settings

if TYPE_CHECKING:
    from workers.engine import Engine

log = logging.getLogger(__name__)

#: KV tokens where requests may be preempted.
UNBOUNDED = 1 << 62


class KVBudget:
    """`tokens` of KV cache in blocks of `block_size` tokens. Waiting requests are served first come, first served."""

    def __init__(self, tokens: int, block_size: int) -> None:
        self._block_size = block_size
        # vLLM keeps one block for itself.
        self.capacity = max(0, tokens // block_size - 1)
        self.free = self.capacity
        self.waits = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, tokens: int) -> AsyncIterator[None]:
        """Hold blocks for `tokens`; waits for them. A request larger than the cache gets all of it."""
        blocks = min(self.capacity, -(-tokens // self._block_size))
        await self._take(blocks)
        try:
            yield
        finally:
            self.free += blocks
            self._serve()

    async def _take(self, blocks: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (blocks, turn)
        self._queue.append(entry)
        self._serve()
        if turn.done():
            return
        self.waits += 1
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
            elif turn.done() and not turn.cancelled():
                self.free += blocks
            self._serve()
            raise

    def _serve(self) -> None:
        while self._queue and self._queue[0][0] <= self.free:
            blocks, turn = self._queue.popleft()
            if not turn.cancelled():
                self.free -= blocks
                turn.set_result(None)


def of(settings: Settings, engine: Engine) -> KVBudget:
    """What requests wait for in a worker. Where the prompt is prefilled, its embeddings are held, and a request that
    the engine preempts can be prefilled again; elsewhere only one of text alone can."""
    if not settings.enable_multimodal or Role.DECODE not in settings.roles or Role.PREFILL in settings.roles:
        return KVBudget(UNBOUNDED, engine.block_size)
    log.info(
        "%d KV tokens hold %d requests of full length (%d tokens): what does not fit waits and is never preempted",
        engine.kv_tokens,
        engine.kv_tokens // engine.max_model_len,
        engine.max_model_len,
    )
    return KVBudget(engine.kv_tokens, engine.block_size)
