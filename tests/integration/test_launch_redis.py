"""app.launch.redis_server: which Redis an `up` uses, and its own."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.launch import redis_server
from app.launch.errors import LaunchError
from app.launch.process import Process
from app.launch.redis_server import Found
from app.redis import UnsafeBroker, connect, refuse_unsafe_broker
from app.settings_sections import RedisSettings
from tests.polling import until
from tests.redis_server import free_port
from tests.redis_server import redis_server as server


@contextlib.asynccontextmanager
async def foreign(answer: bytes | None) -> AsyncIterator[int]:
    """A server that is no Redis: it says `answer` to whatever comes, or nothing at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(100)
            if answer is not None:
                writer.write(answer)
                await writer.drain()
            else:
                await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


def at(port: int, credentials: str = "", host: str = "127.0.0.1") -> RedisSettings:
    return RedisSettings(broker_url=f"redis://{credentials}{host}:{port}/3")


async def test_a_redis_that_answers_is_used_as_it_is(redis_url: str) -> None:
    given = RedisSettings(broker_url=redis_url)
    assert await redis_server.choose(given) == redis_server.Servers(given)


async def test_a_silent_port_gets_a_server_without_password() -> None:
    port = free_port()
    chosen = await redis_server.choose(at(port, "me:secret@", "localhost"))
    assert chosen.own == ("127.0.0.1", port)
    assert chosen.settings.broker_url == f"redis://127.0.0.1:{port}/3"
    assert chosen.note == ""


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
async def test_what_is_no_redis_is_left_alone_and_another_port_taken(answer: bytes | None) -> None:
    async with foreign(answer) as port:
        chosen = await redis_server.choose(at(port))
        assert chosen.own is not None
        assert chosen.own[1] != port
        assert chosen.settings.broker_url == f"redis://127.0.0.1:{chosen.own[1]}/3"
        assert f"port {port} is taken" in chosen.note


@pytest.mark.parametrize("url", ["redis://10.255.255.1:1/0", "rediss://127.0.0.1:1/0", "unix:///no/such/socket"])
async def test_only_on_loopback_is_one_started(url: str) -> None:
    with pytest.raises(LaunchError, match="only on loopback"):
        await redis_server.choose(RedisSettings(broker_url=url))


async def test_a_socket_file_that_answers_is_used(tmp_path: Path) -> None:
    with server(None, "--unixsocket", str(tmp_path / "socket")):
        given = RedisSettings(broker_url=f"unix://{tmp_path / 'socket'}")
        assert await redis_server.choose(given) == redis_server.Servers(given)


async def test_a_cache_that_does_not_answer_is_an_error(redis_url: str) -> None:
    with pytest.raises(LaunchError, match=r"redis\.cache_url redis://127.0.0.1:\d+/0 \(nothing there\)"):
        await redis_server.choose(RedisSettings(broker_url=redis_url, cache_url=f"redis://127.0.0.1:{free_port()}/0"))


async def test_one_that_may_evict_queues_is_refused_before_anything_starts() -> None:
    with (
        server(None, "--maxmemory-policy", "allkeys-lru") as evicting,
        pytest.raises(UnsafeBroker, match="allkeys-lru"),
    ):
        await redis_server.choose(RedisSettings(broker_url=evicting.url))


async def test_a_wrong_password_is_told_without_the_password() -> None:
    with server() as locked:
        client = connect(locked.url, 2.0, name="test")
        await client.config_set("requirepass", "right")
        await client.aclose()
        for credentials in ("", ":wrong@"):
            with pytest.raises(LaunchError, match="refuses us") as caught:
                await redis_server.look(locked.url.replace("//", f"//{credentials}"))
            assert "wrong@" not in str(caught.value)
        assert await redis_server.look(locked.url.replace("//", "//:right@")) is Found.REDIS


async def test_our_own_server_is_safe_bound_to_loopback_and_keeps_nothing(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    process = Process(redis_server.spec(("127.0.0.1", port), tmp_path, tmp_path / "redis.log", os.environ))
    await process.start()
    client: Any = None
    try:
        await until(lambda: redis_server.serves(url, process.pid), "our server")
        assert not await redis_server.serves(url, process.pid + 1)
        client = connect(url, 2.0, name="test")
        await refuse_unsafe_broker(client, url)
        config = await client.config_get("bind", "save", "appendonly", "maxmemory-policy", "dir")
        assert config == {
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "volatile-lru",
            "dir": str(tmp_path),
        }
    finally:
        if client is not None:
            await client.aclose()
        await process.kill()
    assert os.listdir(tmp_path) == ["redis.log"]
