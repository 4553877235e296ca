"""app.media.single_flight: who shares work, and when it ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from app.media.single_flight import SingleFlight
from tests.polling import until


class Work:
    """`left` counts contexts that were entered and left again."""

    def __init__(self) -> None:
        self.begun = self.cancelled = self.left = 0
        self.go = asyncio.Event()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[int]:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        yield self.begun
        self.left += 1


async def join(flights: SingleFlight[str, int], key: str, work: Callable[[], Any]) -> int:
    async with flights.join(key, work) as result:
        return result


async def joined(flights: SingleFlight[str, int], work: Work, *keys: str) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(join(flights, key, work)) for key in keys]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_the_same_key_shares_and_another_does_not() -> None:
    flights, work = SingleFlight[str, int](), Work()
    tasks = await joined(flights, work, "a", "a", "b")
    assert work.begun == 2
    work.go.set()
    await asyncio.gather(*tasks)
    assert await join(flights, "a", work) == 3, "what has ended is begun anew"


async def test_one_who_leaves_ends_nothing_for_the_others() -> None:
    flights, work = SingleFlight[str, int](), Work()
    first, second = await joined(flights, work, "a", "a")
    first.cancel()
    await asyncio.wait({first})
    work.go.set()
    assert await second == 1 and work.cancelled == 0


async def test_the_last_to_leave_ends_it_and_who_comes_then_begins_anew() -> None:
    flights, work = SingleFlight[str, int](), Work()
    tasks = await joined(flights, work, "a", "a")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    work.go.set()
    assert await join(flights, "a", work) == 2
    assert work.cancelled == 1


async def test_all_get_the_failure() -> None:
    @asynccontextmanager
    async def fail() -> AsyncIterator[int]:
        raise ValueError("no")
        yield

    flights = SingleFlight[str, int]()
    outcomes = await asyncio.gather(*(join(flights, "a", fail) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in outcomes] == [ValueError] * 3


async def test_it_is_left_by_the_last_who_uses_it_and_who_comes_meanwhile_begins_anew() -> None:
    flights, work = SingleFlight[str, int](), Work()
    work.go.set()
    async with flights.join("a", work) as first:
        async with flights.join("a", work) as second:
            assert (first, second) == (1, 2), "the first had what it wanted before the second came"
        await until(lambda: work.left == 1, "the second to be left")
    await until(lambda: work.left == 2, "the first to be left")


async def test_what_two_share_is_left_when_both_have() -> None:
    flights, work = SingleFlight[str, int](), Work()
    both, one = AsyncExitStack(), AsyncExitStack()
    entering = [asyncio.create_task(stack.enter_async_context(flights.join("a", work))) for stack in (both, one)]
    await asyncio.sleep(0)
    work.go.set()
    assert await asyncio.gather(*entering) == [1, 1]
    await one.aclose()
    for _ in range(5):
        await asyncio.sleep(0)
    assert work.left == 0
    await both.aclose()
    await until(lambda: work.left == 1, "its end")


async def test_closing_ends_all() -> None:
    flights, work = SingleFlight[str, int](), Work()
    tasks = await joined(flights, work, "a", "b")
    await flights.close()
    assert work.cancelled == 2
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
