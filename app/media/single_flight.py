"""One piece of work for all who want the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SingleFlight(Generic[K, T]):
    """Work by key. It ends when it is done, or when all who wait for it have left."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    async def join(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the work that runs under the key, which is `work()` if none does. Raises what it raises."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                self._forget(key, flight)
                flight.task.cancel()

    async def close(self) -> None:
        """End all work, and wait for that."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: K, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
