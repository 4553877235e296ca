"""app.streaming: both sides on a Redis that drops connections, restarts, stays away."""

import asyncio
from typing import Any

import pytest

from app import keys
from app.redis import connect
from app.streaming import writer
from tests.integration.streams import (
    API,
    delta,
    last,
    opened,
    reading,
    sequence,
    tick_for_ever,
    whole,
    writer_of,
)
from tests.messages import DECODE, PREFILL
from tests.polling import until
from tests.redis_server import redis_server


async def test_256_requests_of_two_workers_at_once(redis: Any) -> None:
    async with reading(redis) as reader:
        writers = [writer_of(redis, PREFILL), writer_of(redis, DECODE)]
        streams = [opened(reader, f"r{n}", DECODE) for n in range(256)]
        for seq in range(20):
            for n in range(256):
                writers[n % 2].put(API, (last if seq == 19 else delta)(f"r{n}", seq))
            await asyncio.sleep(0)
        for stream in streams:
            assert sequence(await whole(stream)) == list(range(20))
        assert reader.gaps == 0


async def drop_connection(redis: Any) -> None:
    await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


async def test_connections_that_are_dropped_in_the_middle_lose_nothing(redis: Any) -> None:
    async with reading(redis) as reader:
        tokens = writer_of(redis)
        await redis.set(keys.api(API), "alive", ex=60)
        streams = [opened(reader, f"r{n}") for n in range(4)]
        for seq in range(200):
            if seq % 50 == 25:
                await drop_connection(redis)
            for n in range(4):
                tokens.put(API, (last if seq == 199 else delta)(f"r{n}", seq))
            await tokens.drain(5)
        ticking = asyncio.create_task(tick_for_ever(tokens))
        for stream in streams:
            assert sequence(await whole(stream)) == list(range(200))
        ticking.cancel()
        assert reader.gaps > 0, "nothing was lost, so this test shows nothing"


async def test_a_restart_of_redis_in_the_middle() -> None:
    """What had arrived is not sent again, and what follows arrives: no stream ends."""
    with redis_server() as server:
        reader_side, writer_side = (connect(server.url, 2.0, name="test") for _ in range(2))
        async with reading(reader_side) as reader:
            tokens, stream = writer_of(writer_side), opened(reader, "a")
            for seq in range(100):
                if seq == 50:
                    await until(lambda: stream._expected == 50, "what was sent before the restart")
                    server.restart()
                tokens.put(API, (last if seq == 99 else delta)("a", seq))
                await tokens.drain(12)
            ticking = asyncio.create_task(tick_for_ever(tokens))
            assert sequence(await whole(stream)) == list(range(100))
            ticking.cancel()
        await reader_side.aclose()
        await writer_side.aclose()


async def test_a_redis_that_is_away_for_a_while() -> None:
    with redis_server() as server:
        reader_side, writer_side = (connect(server.url, 1.0, name="test") for _ in range(2))
        async with reading(reader_side) as reader:
            tokens, stream = writer_of(writer_side), opened(reader, "a")
            tokens.put(API, delta("a", 0))
            await until(lambda: stream._expected == 1, "the first delta")
            server.stop()
            for seq in range(1, 20):
                tokens.put(API, delta("a", seq))
                await asyncio.sleep(0.02)
            server.start()
            tokens.put(API, last("a", 20))
            assert sequence(await whole(stream)) == list(range(21))
        await reader_side.aclose()
        await writer_side.aclose()


async def test_a_redis_that_stays_away_ends_the_requests_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker drops them, so the API must not wait for them when Redis is back."""
    monkeypatch.setattr(writer, "RETRY_FOR_S", 0.3)
    gone: list[str] = []
    with redis_server() as server:
        reader_side, writer_side = (connect(server.url, 0.5, name="test") for _ in range(2))
        async with reading(reader_side) as reader:
            tokens, stream = writer_of(writer_side, on_gone=gone.append), opened(reader, "a")
            tokens.put(API, delta("a", 0))
            await until(lambda: stream._expected == 1, "the first delta")
            server.stop()
            tokens.put(API, delta("a", 1))
            await until(lambda: gone == [API], "that the worker gives up")
            server.start()
            reader.subscribed.clear()
            await asyncio.wait_for(reader.subscribed.wait(), 10)
            await tokens.tick()
            error = (await whole(stream))[-1].error
            assert error is not None and error.code == "tokens_lost"
            after = opened(reader, "b")
            tokens.put(API, last("b", 0))
            assert sequence(await whole(after)) == [0]
        await reader_side.aclose()
        await writer_side.aclose()
