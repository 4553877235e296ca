"""The pace of an engine without a model: every request in it gets a token at each step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Steps:
    """`run` it beside those who iterate over `tokens`. Steps come by the clock, however late their listeners are."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._number = 0
        self._next = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            await asyncio.sleep(max(0.0, started + (self._number + 1) * self._every_s - loop.time()))
            self._number = int((loop.time() - started) / self._every_s)
            self._next.set()
            self._next = asyncio.Event()

    async def tokens(self, count: int) -> AsyncIterator[range]:
        """The numbers of the tokens that are new, each time that there are some, until there were `count`."""
        began, given = self._number, 0
        while given < count:
            await self._next.wait()
            due = min(count, self._number - began)
            if due > given:
                yield range(given, due)
                given = due
