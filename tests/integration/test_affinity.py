"""app.routing.affinity with a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import keys
from app.redis import connect
from app.routing.affinity import CHUNK, HeldBlocks
from tests.polling import until
from tests.redis_server import redis_server

KEY = keys.kv("w@1", 0)


def held(redis: Any, *, lease_s: float = 5.0, renew_s: float = 0.05, most: int = 1_000_000) -> HeldBlocks:
    return HeldBlocks(redis, KEY, lease_s=lease_s, renew_s=renew_s, most=most)


def names(count: int, start: int = 0) -> list[str]:
    return [f"{number:016x}" for number in range(start, start + count)]


async def there(redis: Any) -> set[str]:
    return {member.decode() for member in await redis.smembers(KEY)}


async def has(redis: Any, wanted: list[str]) -> bool:
    return await there(redis) == {*wanted}


async def gone(redis: Any) -> bool:
    return not await redis.exists(KEY)


@asynccontextmanager
async def running(blocks: HeldBlocks) -> AsyncIterator[None]:
    task = asyncio.create_task(blocks.run())
    yield
    assert not task.done(), "it must go on whatever happens"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_restart_begins_with_nothing(redis: Any) -> None:
    await redis.sadd(KEY, *names(3))
    await held(redis).write()
    assert await gone(redis)


async def test_redis_has_what_was_added_and_not_removed_since(redis: Any) -> None:
    blocks = held(redis)
    blocks.add(names(10))
    await blocks.write()
    blocks.remove(names(4))
    blocks.add(names(1, start=20))
    blocks.remove(["never there"])
    await blocks.write()
    assert await there(redis) == {*names(6, start=4), *names(1, start=20)} and len(blocks) == 7


async def test_everything_has_the_lease(redis: Any) -> None:
    blocks = held(redis, lease_s=5.0)
    blocks.add(names(2 * CHUNK + 1))
    await blocks.write()
    assert await redis.scard(KEY) == 2 * CHUNK + 1
    assert 4000 < await redis.pttl(KEY) <= 5000


async def test_what_a_dead_worker_held_is_gone_with_its_lease(redis: Any) -> None:
    blocks = held(redis, lease_s=0.4)
    blocks.add(names(3))
    async with running(blocks):
        await asyncio.sleep(0.8)
        assert await redis.scard(KEY) == 3, "a lease that is renewed runs out"
    await until(lambda: gone(redis), "the set goes")


async def test_a_change_is_sent_at_once_and_not_with_the_next_renewal(redis: Any) -> None:
    blocks = held(redis, lease_s=600.0, renew_s=300.0)
    async with running(blocks):
        blocks.add(names(1))
        await until(lambda: has(redis, names(1)), "the name comes")
        blocks.remove(names(1))
        await until(lambda: gone(redis), "the name goes")


@pytest.mark.parametrize("loss", ["all", "some"])
async def test_what_redis_lost_is_written_again(redis: Any, loss: str) -> None:
    blocks = held(redis)
    blocks.add(names(2 * CHUNK))
    async with running(blocks):
        await until(lambda: has(redis, names(2 * CHUNK)), "all are there")
        await (redis.delete(KEY) if loss == "all" else redis.srem(KEY, *names(7)))
        blocks.remove(names(1, start=CHUNK))
        left = [*names(CHUNK), *names(CHUNK - 1, start=CHUNK + 1)]
        await until(lambda: has(redis, left), "all but one are there again")
    assert blocks.counts.rewrites == 2


async def test_a_redis_that_was_away_gets_everything() -> None:
    with redis_server() as server:
        client = connect(server.url, 1.0, name="test")
        blocks = held(client)
        blocks.add(names(3))
        async with running(blocks):
            await until(lambda: has(client, names(3)), "all are there")
            await asyncio.to_thread(server.stop)
            blocks.add(names(1, start=3))
            await until(lambda: blocks.counts.failed, "a write fails")
            await asyncio.to_thread(server.start)
            blocks.remove(names(1))
            await until(lambda: has(client, names(3, start=1)), "all are there again")
        await client.aclose()


async def test_clear_takes_all_of_it_away(redis: Any) -> None:
    blocks = held(redis)
    blocks.add(names(5))
    await blocks.write()
    blocks.clear()
    blocks.add(names(2, start=4))
    await blocks.write()
    assert await there(redis) == {*names(2, start=4)}


async def test_of_too_many_the_oldest_are_left_out(redis: Any) -> None:
    blocks = held(redis, most=4)
    blocks.add(names(3))
    await blocks.write()
    blocks.add(names(3, start=10))
    await blocks.write()
    assert await there(redis) == {*names(1), *names(3, start=10)} and blocks.counts.left_out == 2
    blocks.remove(names(13))
    await blocks.write()
    assert blocks.full is False and not await there(redis)


async def test_what_is_added_again_is_kept_longer_and_its_beginning_longest(redis: Any) -> None:
    blocks = held(redis, most=4)
    blocks.add(names(2))
    blocks.add(names(2, start=10))
    blocks.add(names(2))
    blocks.add(names(3, start=20))
    await blocks.write()
    assert await there(redis) == {*names(1), *names(3, start=20)}


async def test_the_end_takes_the_set_away(redis: Any) -> None:
    blocks = held(redis)
    blocks.add(names(5))
    await blocks.write()
    await blocks.close()
    assert await gone(redis)


steps = st.lists(st.tuples(st.sampled_from(["add", "remove", "clear", "write"]), st.sets(st.integers(0, 12))))


@given(steps=steps, most=st.integers(1, 12))
async def test_any_changes_in_any_order_end_in_what_is_held(steps: Any, most: int, redis_url: str) -> None:
    async with connect(redis_url, 5.0, name="test") as redis:
        blocks = held(redis, most=most)
        await blocks.write()
        for step, numbers in steps:
            if step == "write":
                await blocks.write()
            elif step == "clear":
                blocks.clear()
            else:
                getattr(blocks, step)([names(1, start=number)[0] for number in numbers])
        await blocks.write()
        assert await there(redis) == set(blocks._held) and len(blocks) <= most
        assert blocks.counts.rewrites <= 1 + sum(step == "clear" for step, _ in steps)
