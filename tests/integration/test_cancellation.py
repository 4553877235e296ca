"""app.cancellation: the message, the tombstone, and what a lost connection must not lose."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from app import cancellation, keys
from app.redis import connect
from tests.polling import until
from tests.redis_server import redis_server


@asynccontextmanager
async def listening(redis: Any, running: list[str]) -> AsyncIterator[list[str]]:
    """The ids that a worker with these requests is told to cancel."""
    told: list[str] = []
    task = asyncio.create_task(cancellation.listen(redis, told.append, lambda: running))
    await until(lambda: _listeners(redis), "the subscription")
    yield told
    assert not task.done(), task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _listeners(redis: Any) -> int:
    ((_, number),) = await redis.pubsub_numsub(keys.CANCEL_CHANNEL)
    return int(number)


async def test_a_listener_is_told(redis: Any) -> None:
    async with listening(redis, []) as told:
        await cancellation.cancel(redis, "a")
        await until(lambda: told == ["a"], "the message")


async def test_a_tombstone_is_left_and_ends(redis: Any) -> None:
    assert not await cancellation.is_cancelled(redis, "a")
    await cancellation.cancel(redis, "a")
    assert await cancellation.is_cancelled(redis, "a")
    assert not await cancellation.is_cancelled(redis, "b")
    assert 0 < await redis.ttl(keys.cancelled("a")) <= keys.CANCELLED_TTL_S


async def test_what_was_cancelled_before_anybody_listened(redis: Any) -> None:
    await cancellation.cancel(redis, "b")
    async with listening(redis, ["a", "b", "c"]) as told:
        await until(lambda: told == ["b"], "the tombstone")


async def test_what_was_cancelled_while_the_connection_was_down(redis: Any) -> None:
    """redis-py connects again by itself and raises nothing, so this is not only about errors."""
    async with listening(redis, ["a", "b"]) as told:
        pipe = redis.pipeline(transaction=True)
        pipe.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        pipe.set(keys.cancelled("a"), "1", ex=10)
        pipe.publish(keys.CANCEL_CHANNEL, "a")
        _, _, receivers = await pipe.execute()
        assert receivers == 0, "the message was not lost, so this test shows nothing"
        await until(lambda: told == ["a"], "the tombstone after the reconnect")
        await cancellation.cancel(redis, "b")
        await until(lambda: told == ["a", "b"], "a message after the reconnect")


async def test_a_restart_of_redis() -> None:
    with redis_server() as server:
        redis = connect(server.url, 2.0, name="test")
        async with listening(redis, ["a"]) as told:
            server.restart()
            await cancellation.cancel(redis, "a")
            await until(lambda: "a" in told, "the request")
        await redis.aclose()


async def test_a_message_that_is_no_text_stops_nothing(redis: Any) -> None:
    async with listening(redis, []) as told:
        await redis.publish(keys.CANCEL_CHANNEL, b"\xff\xfe")
        await cancellation.cancel(redis, "a")
        await until(lambda: told[-1:] == ["a"], "the message after it")
