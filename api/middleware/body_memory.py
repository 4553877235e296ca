"""How much of this process's memory large request bodies take at once."""

from __future__ import annotations

import asyncio
from collections import deque

from app.errors.requests import BodyMemoryFull

#: Bodies up to this size are not counted: there are as many of them as requests in flight.
SMALL = 1 << 20
#: Longest wait for the bodies of others.
WAIT_S = 30.0


class Room:
    """Memory for one body, none at first. Made by `BodyMemory.room`."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._size = 0

    async def take(self, size: int) -> None:
        """Wait until there is room, once. A body larger than all of it waits until it is alone.

        Raises BodyMemoryFull.
        """
        if size > SMALL and not self._size:
            self._size = await self._memory.take(size)

    def shrink(self, size: int) -> None:
        """The body takes no more memory than that from now on."""
        size = size if size > SMALL else 0
        if size < self._size:
            self._memory.give_back(self._size - size)
            self._size = size


class BodyMemory:
    """Bytes for bodies that are being read, parsed, and relieved of their media. First come, first served."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._capacity = capacity
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def room(self) -> Room:
        return Room(self)

    async def take(self, size: int) -> int:
        """What has to be given back: `size`, or all there is. Raises BodyMemoryFull."""
        size = min(size, self._capacity)
        if self._waiting or size > self.free:
            await self._turn(size)
        else:
            self.free -= size
        return size

    def give_back(self, size: int) -> None:
        self.free += size
        self._serve()

    async def _turn(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give_back(size)  # it came just now
            else:
                self._waiting = deque(one for one in self._waiting if one[1] is not turn)
                self._serve()
            if isinstance(error, TimeoutError):
                raise BodyMemoryFull(
                    "the bodies of other requests take all memory that api.body_memory_mb gives them; try again"
                ) from None
            raise

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.free:
            size, turn = self._waiting.popleft()
            if not turn.done():
                self.free -= size
                turn.set_result(None)
