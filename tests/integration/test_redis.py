"""app.redis, against real servers: one that answers, that hangs, that is not there, that may evict."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from app.redis import (
    RedisUnavailable,
    UnsafeBroker,
    connect,
    redacted,
    refuse_unsafe_broker,
    subscription,
    wait_until_up,
)
from app.settings_sections import RedisSettings
from tests.polling import until
from tests.redis_server import RedisServer, free_port, redis_server


@contextmanager
def hung(server: RedisServer) -> Iterator[None]:
    """A server that has stopped answering but not closed a connection."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@asynccontextmanager
async def client_of(url: str, timeout_s: float = 5.0, **options: Any) -> AsyncIterator[Any]:
    client = connect(url, timeout_s, name="test", **options)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


async def test_more_commands_than_connections_wait(redis_url: str) -> None:
    async with client_of(redis_url, connections=4) as client:
        await client.set("n", 0)
        await asyncio.gather(*(client.incr("n") for _ in range(200)))
        assert await client.get("n") == b"200"
        names = [one["name"] for one in await client.client_list()]
    assert 1 <= names.count("test") <= 4


async def test_any_name_will_do(redis_url: str) -> None:
    client = connect(redis_url, 5.0, name="trivet-wörker 1\n@h")
    assert await client.client_getname() in ("trivet-w_rker_1_@h", b"trivet-w_rker_1_@h")
    await client.aclose()


async def test_a_hung_server_is_given_up_after_the_timeout(server: RedisServer) -> None:
    async with client_of(server.url, 0.5) as client:
        await client.ping()
        with hung(server):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                await client.ping()
            assert time.monotonic() - began < 2
        assert await client.ping()


@pytest.mark.parametrize("connected", [False, True])
async def test_a_cancellation_is_never_lost(redis_url: str, connected: bool) -> None:
    """Wherever it comes: while connecting, sending, or waiting for the answer."""

    async def for_ever(client: Any) -> None:
        while True:
            await client.get("x")

    for turns in range(60):
        async with client_of(redis_url) as client:
            if connected:
                await client.ping()
            task = asyncio.create_task(for_ever(client))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=1)
            assert task.cancelled(), f"after {turns} turns of the loop"
            assert await client.ping()


async def test_a_command_that_timed_out_runs_once_at_most(server: RedisServer) -> None:
    """The hang ends while the client still tries: a second copy of a task must not be queued."""
    async with client_of(server.url, 0.6) as client:
        await client.ping()
        with hung(server):
            pushing = asyncio.create_task(client.lpush("queue", "task"))
            await asyncio.sleep(0.9)
        await asyncio.gather(pushing, return_exceptions=True)
        await until(client.ping, "an answer")
        assert await client.llen("queue") <= 1


async def test_a_restarted_server_costs_no_command(server: RedisServer) -> None:
    async with client_of(server.url) as client:
        await client.ping()
        server.restart()
        assert await client.ping()


async def collect(client: Any, channel: str, seen: list[bytes | None]) -> None:
    async with aclosing(subscription(client, channel)) as messages:
        async for message in messages:
            seen.append(message)


async def test_a_subscription_says_when_it_is_made_and_made_again(redis: Any) -> None:
    seen: list[bytes | None] = []
    task = asyncio.create_task(collect(redis, "channel", seen))
    await until(lambda: seen == [None], "the subscription")
    await redis.publish("channel", "one")
    await until(lambda: seen == [None, b"one"], "the first message")
    assert await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub") == 1
    await until(lambda: seen == [None, b"one", None], "the second subscription")
    await redis.publish("channel", "two")
    await until(lambda: seen[-1] == b"two", "the message after it")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: _no_subscriber(redis), "the end of the subscription")


async def _no_subscriber(redis: Any) -> bool:
    return bool(await redis.pubsub_numsub("channel") == [(b"channel", 0)])


async def test_messages_are_not_written_out_for_the_log(redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bytes | None] = []
    with caplog.at_level(logging.DEBUG, "push_response"):
        task = asyncio.create_task(collect(redis, "channel", seen))
        await until(lambda: seen == [None], "the subscription")
        await redis.publish("channel", "hello")
        await until(lambda: seen == [None, b"hello"], "the message")
    assert not [one for one in caplog.records if "hello" in one.getMessage()]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_subscription_ends_when_its_server_does(server: RedisServer) -> None:
    async with client_of(server.url, 1.0) as client:
        seen: list[bytes | None] = []
        task = asyncio.create_task(collect(client, "channel", seen))
        await until(lambda: seen == [None], "the subscription")
        server.stop()
        with pytest.raises((RedisError, OSError)):
            await asyncio.wait_for(task, 10)


async def test_a_half_open_subscription_ends(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is closed, and not even a ping is answered."""
    monkeypatch.setattr("app.redis.SILENCE_S", 0.5)
    async with client_of(server.url, 30.0) as client:
        client.connection_pool.connection_kwargs["health_check_interval"] = 0.5
        seen: list[bytes | None] = []
        task = asyncio.create_task(collect(client, "channel", seen))
        await until(lambda: seen == [None], "the subscription")
        with hung(server), pytest.raises(ConnectionError, match="no answer to a ping"):
            await asyncio.wait_for(task, 20)


async def test_an_idle_subscription_lives(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.redis.SILENCE_S", 0.5)
    redis.connection_pool.connection_kwargs["health_check_interval"] = 0.5
    seen: list[bytes | None] = []
    task = asyncio.create_task(collect(redis, "channel", seen))
    await until(lambda: seen == [None], "the subscription")
    done, _ = await asyncio.wait([task], timeout=5.5)
    assert not done, "ended although the server answers pings"
    await redis.publish("channel", "still there")
    await until(lambda: seen == [None, b"still there"], "a message after the silence")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_no_server_is_said_within_the_timeout() -> None:
    settings = RedisSettings(broker_url=f"redis://:secret@127.0.0.1:{free_port()}/0", timeout_s=0.5)
    async with client_of(settings.broker_url, 0.5) as client:
        began = time.monotonic()
        with pytest.raises(RedisUnavailable) as caught:
            await wait_until_up(client, settings)
    assert time.monotonic() - began < 3
    said = str(caught.value)
    assert settings.broker_url.rpartition("@")[2].removesuffix("/0") in said
    assert "TRIVET_REDIS__BROKER_URL" in said and "TRIVET_REDIS__WAIT=true" in said and "trivet up" in said
    assert "secret" not in said


async def test_told_to_wait_it_waits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    async with client_of(url, 0.5) as client:
        with caplog.at_level(logging.WARNING, "app.redis"):
            settings = RedisSettings(broker_url=url, timeout_s=0.1, wait=True)
            waiting = asyncio.create_task(wait_until_up(client, settings))
            await until(lambda: f"waiting for Redis at 127.0.0.1:{port}" in caplog.text, "a line in the log")
            done, _ = await asyncio.wait([waiting], timeout=0.5)
            assert not done
        assert len(caplog.records) == 1, "one line, not one for each try"
        with redis_server(port):
            await asyncio.wait_for(waiting, 10)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
async def test_a_broker_that_may_evict_queues_is_refused_with_the_command(redis: Any, policy: str) -> None:
    await redis.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(UnsafeBroker) as caught:
            await refuse_unsafe_broker(redis, "redis://user:secret@host:1/0")
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
    said = str(caught.value)
    assert policy in said and "redis-cli CONFIG SET maxmemory-policy volatile-lru" in said
    assert "secret" not in said and "host:1" in said


async def test_the_command_in_the_message_mends_it(redis: Any) -> None:
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnsafeBroker) as caught:
        await refuse_unsafe_broker(redis, "redis://host")
    words = str(caught.value).partition("redis-cli ")[2].split()[:4]
    await redis.execute_command(*words)
    await refuse_unsafe_broker(redis, "redis://host")
    await redis.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru", "volatile-ttl"])
async def test_a_broker_that_keeps_its_queues_is_taken(redis: Any, policy: str) -> None:
    await redis.config_set("maxmemory-policy", policy)
    await refuse_unsafe_broker(redis, "redis://host")
    await redis.config_set("maxmemory-policy", "noeviction")


async def test_where_config_is_forbidden_info_tells(redis_url: str, redis: Any) -> None:
    await redis.execute_command("ACL", "SETUSER", "guest", "on", "nopass", "~*", "&*", "+@all", "-config")
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        async with client_of(redis_url.replace("redis://", "redis://guest:x@")) as guest:
            with pytest.raises(UnsafeBroker):
                await refuse_unsafe_broker(guest, "redis://host")
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
        await redis.execute_command("ACL", "DELUSER", "guest")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:se@cret@host/0", "rediss://user:***@host/0"),
        ("unix://user:secret@/run/redis.sock?db=1", "unix://user:***@/run/redis.sock?db=1"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown
