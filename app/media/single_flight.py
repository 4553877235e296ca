"""One piece of work for all who want the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass
class _Flight(Generic[T]):
    """`left` is set once nobody uses the result any more."""

    result: asyncio.Future[T]
    task: asyncio.Task[None] = field(init=False)
    using: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)


class SingleFlight(Generic[K, T]):
    """Work by key, each a context. It is left when nobody uses its result any more, or waits for it."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}
        self._running: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def join(self, key: K, work: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
        """What the work gives that is being entered under the key: `work()` if none is. Raises what that raises.

        Once it is entered, who comes next begins anew.
        """
        flight = self._flights.get(key) or self._begin(key, work)
        flight.using += 1
        try:
            yield await asyncio.shield(flight.result)
        finally:
            flight.using -= 1
            if not flight.using:
                self._forget(key, flight)
                flight.left.set()
                if not flight.result.done():
                    flight.task.cancel()

    def _begin(self, key: K, work: Callable[[], AbstractAsyncContextManager[T]]) -> _Flight[T]:
        flight: _Flight[T] = _Flight(asyncio.get_running_loop().create_future())
        self._flights[key] = flight
        flight.task = asyncio.create_task(self._run(key, flight, work))
        self._running.add(flight.task)
        flight.task.add_done_callback(self._running.discard)
        return flight

    async def _run(self, key: K, flight: _Flight[T], work: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        try:
            async with work() as result:
                self._forget(key, flight)
                flight.result.set_result(result)
                await flight.left.wait()
        except asyncio.CancelledError:
            flight.result.cancel()
            raise
        except Exception as error:
            self._forget(key, flight)
            if flight.result.done():
                raise
            flight.result.set_exception(error)

    async def close(self) -> None:
        """End all work, and wait for that."""
        tasks = [*self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: K, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
