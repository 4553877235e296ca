"""In which order encode tasks get room for their items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Arrivals:
    """Where there is little room, as they came, however long each is prepared.

    The items of a prompt come together, and it can do nothing with some of them: a store full of one item of each
    prompt would be of no use to any.
    """

    def __init__(self) -> None:
        self._settled: dict[Arrival, asyncio.Event] = {}

    @contextmanager
    def arrival(self) -> Iterator[Arrival]:
        """The next one; over with the block at the latest."""
        one = Arrival(self)
        self._settled[one] = asyncio.Event()
        try:
            yield one
        finally:
            one.settle()

    def settle(self, one: Arrival) -> None:
        settled = self._settled.pop(one, None)
        if settled is not None:
            settled.set()

    def before(self, one: Arrival) -> list[asyncio.Event]:
        """Those that came before this one and are not settled."""
        earlier = []
        for other, settled in self._settled.items():
            if other is one:
                break
            earlier.append(settled)
        return earlier


class Arrival:
    """Made by `Arrivals.arrival`."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    async def turn(self, enough: Callable[[int], bool]) -> None:
        """Return once all that came before have asked for their room, or there is `enough` for so many and this one."""
        while (earlier := self._arrivals.before(self)) and not enough(len(earlier) + 1):
            await earlier[0].wait()

    def settle(self) -> None:
        """It asks for its room now, or does without."""
        self._arrivals.settle(self)
