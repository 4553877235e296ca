"""Connections to Redis with limits on every wait, and the check that the broker cannot lose queues."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import redis.asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError, RedisError, ResponseError

from app.errors.serving import BrokerUnavailable
from app.settings_sections import RedisSettings

log = logging.getLogger(__name__)

#: Policies that can drop a key without a TTL, and so a queue with its tasks.
EVICTING_POLICIES = frozenset({"allkeys-lru", "allkeys-lfu", "allkeys-random", "allkeys-lrm"})
#: An idle subscription is pinged after `health_check_interval`; one that stays silent for so much longer is dead.
SILENCE_S = 10.0
#: Seconds between two lines about a Redis that is waited for.
SAY_EVERY_S = 10.0


class RedisUnavailable(RuntimeError):
    """Redis does not answer."""


@contextmanager
def needed(whose: str, asked: str) -> Iterator[None]:
    """A Redis that fails within, as BrokerUnavailable: whose need it is ("routing needs"), and a word for the log."""
    try:
        yield
    except (RedisError, OSError) as error:
        if isinstance(error, ResponseError):
            log.error("%s Redis, which refused what was asked of it (%s): %s", whose, asked, error)
        raise BrokerUnavailable(f"{whose} Redis, which did not answer ({type(error).__name__})") from error


class UnsafeBroker(RuntimeError):
    """The broker's eviction policy could throw queued tasks away."""


def connect(url: str, timeout_s: float, *, name: str, connections: int = 64) -> aioredis.Redis:
    """An asyncio client that waits for a free connection instead of failing, and for no answer longer than `timeout_s`.

    redis-py's own defaults raise at 100 connections and retry ten times, which hides an outage for a minute. A command
    that timed out is not sent again: a Redis that only hung would run it twice, and a task with it.
    """
    pool = aioredis.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        **({} if url.startswith("unix:") else {"socket_keepalive": True}),
        health_check_interval=10,
        # Redis refuses others, and with them the connection; a worker's name may have any.
        client_name=re.sub(r"[^!-~]", "_", name),
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 1, supported_errors=(ConnectionError,)),
    )
    pool.connection_class = _cancellable(pool.connection_class)
    return aioredis.Redis.from_pool(pool)


def _cancellable(kind: Any) -> Any:
    """The connection class `kind`, but one that can be cancelled while it sends.

    redis-py sends under asyncio.wait_for, which in Python 3.11 swallows a cancellation that comes as the write ends: a
    cancelled request would run on, and one past its deadline too.
    """

    class Cancellable(kind):
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if not self.is_connected:
                await self.connect_check_health(check_health=False)
            if check_health:
                await self.check_health()
            try:
                async with asyncio.timeout(self.socket_timeout):
                    await self._send_packed_command([command] if isinstance(command, bytes) else command)
            except BaseException as error:
                # What was sent in part, or has no reader for its answer, spoils the connection.
                await self.disconnect(nowait=True)
                if isinstance(error, TimeoutError):
                    raise exceptions.TimeoutError("Timeout writing to socket") from None
                if isinstance(error, OSError):
                    raise ConnectionError(f"Error while writing to socket: {error}") from error
                raise

    return Cancellable


async def subscription(client: Any, channel: str) -> AsyncGenerator[bytes | None, None]:
    """What comes on a channel; None each time that Redis confirms the subscription: what was sent before may be missed.

    redis-py makes a lost connection again by itself and says so in no other way. Raises RedisError when that fails, or
    when the connection is half-open: nothing comes, not even the answer to a ping.
    """
    async with client.pubsub(push_handler_func=_as_it_is) as pubsub:
        await pubsub.subscribe(channel)
        while True:
            message = await pubsub.get_message(timeout=4.0)
            if message is None:
                overdue = asyncio.get_running_loop().time() - pubsub.connection.next_health_check
                if overdue > SILENCE_S:
                    raise ConnectionError(f"no answer to a ping for {overdue:.0f} s")
            elif message["type"] == "subscribe":
                yield None
            elif message["type"] == "message":
                yield message["data"]


async def _as_it_is(message: Any) -> Any:
    """In place of redis-py's own, which writes every message out for a log line that nobody wants."""
    return message


async def wait_until_up(client: Any, settings: RedisSettings) -> None:
    """Return when Redis answers. Raises RedisUnavailable after `timeout_s`, unless `redis.wait` is set."""
    until, said = time.monotonic() + settings.timeout_s, -SAY_EVERY_S
    while True:
        try:
            await client.ping()
            return
        except (RedisError, OSError) as error:
            if not settings.wait and time.monotonic() >= until:
                raise RedisUnavailable(
                    f"no Redis answers at {_address(client)} ({error}); start one, or set TRIVET_REDIS__BROKER_URL "
                    "(and TRIVET_REDIS__CACHE_URL if that is another), or TRIVET_REDIS__WAIT=true to wait for it; "
                    "`trivet up` starts its own"
                ) from error
            if time.monotonic() >= said + SAY_EVERY_S:
                said = time.monotonic()
                log.warning("waiting for Redis at %s: %s", _address(client), error)
            await asyncio.sleep(0.2)


async def refuse_unsafe_broker(client: Any, url: str) -> None:
    """Raise UnsafeBroker if the server may evict keys that have no TTL: an LRU over all keys drops queues, silently."""
    try:
        policy = (await client.config_get("maxmemory-policy")).get("maxmemory-policy", "")
    except ResponseError:  # CONFIG is renamed or forbidden on many hosted servers
        policy = (await client.info("memory")).get("maxmemory_policy", "")
    if not policy:
        log.warning("the broker at %s hides its maxmemory-policy: make sure that it is no allkeys one", redacted(url))
    if policy in EVICTING_POLICIES:
        raise UnsafeBroker(
            f"the broker at {redacted(url)} may evict its queues (maxmemory-policy {policy}); mend it with: "
            "redis-cli CONFIG SET maxmemory-policy volatile-lru (or give TRIVET_REDIS__BROKER_URL a server of its own)"
        )


def _address(client: Any) -> str:
    at = client.connection_pool.connection_kwargs
    return str(at.get("path") or f"{at.get('host', 'localhost')}:{at.get('port', 6379)}")


def redacted(url: str) -> str:
    """The URL without its password."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{credentials.partition(':')[0]}:***@{host}" if at else url
