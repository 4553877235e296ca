"""app.media.single_flight: who shares work, and when it ends."""

import asyncio

import pytest

from app.media.single_flight import SingleFlight


class Work:
    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.go = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.begun


async def joined(flights: SingleFlight[str, int], work: Work, *keys: str) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.join(key, work)) for key in keys]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_the_same_key_shares_and_another_does_not() -> None:
    flights, work = SingleFlight[str, int](), Work()
    tasks = await joined(flights, work, "a", "a", "b")
    assert work.begun == 2
    work.go.set()
    await asyncio.gather(*tasks)
    assert await flights.join("a", work) == 3, "what has ended is begun anew"


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
    assert await flights.join("a", work) == 2
    assert work.cancelled == 1


async def test_all_get_the_failure() -> None:
    async def fail() -> int:
        raise ValueError("no")

    flights = SingleFlight[str, int]()
    outcomes = await asyncio.gather(*(flights.join("a", fail) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in outcomes] == [ValueError] * 3


async def test_closing_ends_all() -> None:
    flights, work = SingleFlight[str, int](), Work()
    tasks = await joined(flights, work, "a", "b")
    await flights.close()
    assert work.cancelled == 2
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
