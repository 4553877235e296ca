"""What an `up` leaves in a Redis that is not its own, and the removal of that and nothing else."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection, Mapping
from typing import Any

from redis.exceptions import RedisError

from app import keys
from app.launch.state import State
from app.redis import connect
from app.registry import Registry
from app.roles import Role
from app.routing import Reservations

log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
#: Celery's exchange for events. Redis publishes without bindings: they only pile up, one for each start of Flower.
EVENTS = "celeryev"


async def remove_all_of(state: State) -> None:
    """`remove` for the components of an `up`."""
    workers = {one.name: one.pid for one in state.components if one.kind == "worker"}
    apis = [one.pid for one in state.components if one.kind == "api"]
    await remove(state.redis_url, state.cache_url, workers, apis)


async def remove(broker_url: str, cache_url: str, workers: Mapping[str, int], api_pids: Collection[int]) -> None:
    """Delete queues, bindings, registrations and loads of these workers (id -> pid), and what these API processes left.

    A worker that has started anew under an id, by hand perhaps, is left alone.

    A Redis that does not answer is left as it is: that is logged, and no reason not to end.
    """
    cache = connect(cache_url, TIMEOUT_S, name="trivet-up", connections=4)
    broker = connect(broker_url, TIMEOUT_S, name="trivet-up", connections=4)
    try:
        async with asyncio.timeout(4 * TIMEOUT_S):
            ids, orphaned = await _registrations(cache, workers, api_pids)
            await _queues(broker, {keys.worker_queue(role, one) for one in ids for role in Role} | orphaned, ids)
    except (RedisError, OSError) as error:
        log.warning("not cleaned up in Redis: %s", error)
    finally:
        await cache.aclose()
        await broker.aclose()


async def _registrations(
    client: Any, workers: Mapping[str, int], api_pids: Collection[int]
) -> tuple[list[str], set[str]]:
    """Remove them; answer the ids that are nobody's now, and the queues of roles that nobody has and nobody feeds."""
    registry = Registry(client, 1.0)
    others = [one for one in await registry.workers() if one.pid != workers.get(one.id)]
    gone = [one for one in workers if one not in {other.id for other in others}]
    for one in gone:
        await registry.remove(one)
    host = socket.gethostname()
    reservations = Reservations(client, 0.0)
    for owner in [_text(one) for one in await client.zrange(keys.OWNERS, 0, -1)]:
        if any(owner.startswith(f"{host}-{pid}-") for pid in api_pids):
            await reservations.leave(owner)
    for pid in api_pids:
        for pattern in (keys.api(f"{host}-{pid}-*"), keys.replay(f"{host}-{pid}-*")):
            await _delete(client, [key async for key in client.scan_iter(pattern, count=500)])
    held = {role for other in others for role in other.roles}
    fed = [key async for key in client.scan_iter(keys.api("*"), count=500)]
    return gone, set() if fed else {keys.role_queue(role) for role in Role if role not in held}


async def _queues(client: Any, names: set[str], workers: list[str]) -> None:
    """Delete the queues, and their bindings in kombu's tables, permanent ones included."""
    await _delete(client, [key for name in names for key in keys.lists(name)])
    bound = names | {f"{one}.celery.pidbox" for one in workers}
    async for key in client.scan_iter("_kombu.binding*", count=500, _type="set"):
        members = [_text(member) for member in await client.smembers(key)]
        stale = [one for one in members if one.rpartition(keys.SEPARATOR)[2] in bound]
        if stale:
            await client.srem(key, *stale)
    if not await client.exists("_kombu.binding.celery.pidbox"):  # no worker is left
        await client.delete(f"_kombu.binding.{EVENTS}")
    for exchange in await client.zrange("_kombu.binding_deadlines", 0, -1):
        if not await client.exists(f"_kombu.binding.{_text(exchange)}"):
            await client.zrem("_kombu.binding_deadlines", exchange)


async def _delete(client: Any, names: list[Any]) -> None:
    if names:
        await client.delete(*names)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
