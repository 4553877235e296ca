"""Connections to Redis with limits on every wait, and the check that the broker cannot lose queues."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError, ResponseError

from app.settings import RedisSettings

#: Policies that can drop a key without a TTL, and so a queue with its tasks.
EVICTING_POLICIES = frozenset({"allkeys-lru", "allkeys-lfu", "allkeys-random", "allkeys-lrm"})


class RedisUnavailable(RuntimeError):
    """Redis does not answer."""


class UnsafeBroker(RuntimeError):
    """The broker's eviction policy could throw queued tasks away."""


def connect(url: str, timeout_s: float, *, name: str, connections: int = 64) -> aioredis.Redis:
    """An asyncio client that waits for a free connection instead of failing, and for no answer longer than `timeout_s`.

    redis-py's own defaults raise at 100 connections and retry ten times, which hides an outage for a minute.
    """
    pool = aioredis.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=None if url.startswith("unix:") else True,
        health_check_interval=10,
        client_name=name,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 1),
    )
    return aioredis.Redis.from_pool(pool)


async def wait_until_up(client: Any, settings: RedisSettings) -> None:
    """Return when Redis answers. Raises RedisUnavailable after `timeout_s`, unless `redis.wait` is set."""
    until = time.monotonic() + settings.timeout_s
    while True:
        try:
            await client.ping()
            return
        except (RedisError, OSError) as error:
            if not settings.wait and time.monotonic() >= until:
                raise RedisUnavailable(
                    f"no Redis answers at {redacted(settings.broker_url)} ({error}); start one, or set "
                    "TRIVET_REDIS__BROKER_URL, or TRIVET_REDIS__WAIT=true to wait for it; `trivet up` starts its own"
                ) from error
            await asyncio.sleep(0.2)


async def refuse_unsafe_broker(client: Any, url: str) -> None:
    """Raise UnsafeBroker if the server may evict keys that have no TTL: an LRU over all keys drops whole queues, silently."""
    try:
        policy = (await client.config_get("maxmemory-policy")).get("maxmemory-policy", "")
    except ResponseError:  # CONFIG is renamed or forbidden on many hosted servers
        policy = (await client.info("memory")).get("maxmemory_policy", "")
    if policy in EVICTING_POLICIES:
        raise UnsafeBroker(
            f"the broker at {redacted(url)} may evict its queues (maxmemory-policy {policy}); mend it with: "
            "redis-cli CONFIG SET maxmemory-policy volatile-lru   (or give TRIVET_REDIS__BROKER_URL a server of its own)"
        )


def redacted(url: str) -> str:
    """The URL without its password."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{credentials.partition(':')[0]}:***@{host}" if at else url
