"""How much memory decoded media may take in a worker at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DecodedMemory:
    """`limit` bytes of it, first come, first served: many small media do not pass a large one by for ever.

    More than that is taken by one that is larger than all of it, and has it alone.
    """

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taking(self, size: int) -> AsyncIterator[None]:
        """Wait for so many bytes, and have them inside the block. Who holds some already must not ask for more."""
        async with self._turn:
            while self.used and self.used + size > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self.used += size
        try:
            yield
        finally:
            self.used -= size
            self._freed.set()
