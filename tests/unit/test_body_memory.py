"""api.middleware.body_memory."""

from __future__ import annotations

import asyncio
import random

import pytest

from api.middleware import body_memory
from api.middleware.body_memory import SMALL, BodyMemory, Room
from app.errors.requests import BodyMemoryFull
from tests.polling import until

MB = 1_000_000


async def taken(memory: BodyMemory, size: int) -> Room:
    room = memory.room()
    await room.take(size)
    return room


async def test_bodies_wait_for_those_before_them() -> None:
    memory = BodyMemory(30 * MB)
    first, second = await taken(memory, 20 * MB), await taken(memory, 10 * MB)
    waiting = [asyncio.create_task(taken(memory, size)) for size in (25 * MB, 5 * MB)]
    await until(lambda: len(memory._waiting) == 2, "the wait")
    second.shrink(0)
    await asyncio.sleep(0)
    assert memory.free == 10 * MB, "the small one does not overtake"
    first.shrink(0)
    first.shrink(0)
    for one in await asyncio.gather(*waiting):
        one.shrink(0)
    assert memory.free == 30 * MB


async def test_small_ones_never_wait() -> None:
    memory = BodyMemory(30 * MB)
    await taken(memory, 30 * MB)
    room = await asyncio.wait_for(taken(memory, SMALL), 5)
    room.shrink(0)
    assert memory.free == 0


async def test_what_is_left_of_a_body_still_counts() -> None:
    memory = BodyMemory(30 * MB)
    room = await taken(memory, 20 * MB)
    for size, free in [(25 * MB, 10 * MB), (5 * MB, 25 * MB), (8 * MB, 25 * MB), (SMALL, 30 * MB)]:
        room.shrink(size)
        assert memory.free == free


async def test_one_that_is_larger_than_all_goes_alone() -> None:
    memory = BodyMemory(2 * MB)
    room = await asyncio.wait_for(taken(memory, 10 * MB), 5)
    assert memory.free == 0
    room.shrink(0)
    assert memory.free == 2 * MB


async def test_the_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "WAIT_S", 0.05)
    memory = BodyMemory(2 * MB)
    room = await taken(memory, 2 * MB)
    with pytest.raises(BodyMemoryFull, match=r"api\.body_memory_mb") as caught:
        await taken(memory, 2 * MB)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    room.shrink(0)
    (await taken(memory, 2 * MB)).shrink(0)
    assert (memory.free, len(memory._waiting)) == (2 * MB, 0)


async def test_whoever_leaves_takes_nothing() -> None:
    """Two hundred bodies of any size, a third of which are given up at any time."""
    memory = BodyMemory(20 * MB)
    draw = random.Random(1)

    async def body() -> None:
        room = await taken(memory, draw.randrange(2 * MB, 30 * MB))
        assert memory.free >= 0
        try:
            await asyncio.sleep(draw.random() / 500)
        finally:
            room.shrink(0)

    tasks = [asyncio.create_task(body()) for _ in range(200)]
    for task in draw.sample(tasks, 70):
        await asyncio.sleep(draw.random() / 500)
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert (memory.free, len(memory._waiting)) == (20 * MB, 0)
