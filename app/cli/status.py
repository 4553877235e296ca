"""`trivet status`."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import output
from app.cli.up import Name

if TYPE_CHECKING:
    from rich.table import Table

    from app.launch.state import State
    from app.settings import Settings

TIMEOUT_S = 5.0


def status(
    name: Name = "default",
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Workers and adapters, queues, requests in flight and API processes, as Redis knows them; processes of an `up`."""
    from app import settings
    from app.launch.state import StateDirectory

    state = StateDirectory(name).running()
    chosen = settings.load()
    if state is not None:
        redis = chosen.redis.model_copy(update={"broker_url": state.redis_url, "cache_url": state.cache_url})
        chosen = chosen.model_copy(update={"redis": redis})
    found = asyncio.run(collect(chosen))
    found["up"] = None if state is None else _of_up(state)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)


async def collect(settings: Settings) -> dict[str, Any]:
    """`redis`, `workers`, `queues` (role -> length) and `apis`. Raises LaunchError when no Redis answers."""
    from redis.exceptions import RedisError

    from app import keys
    from app.launch.errors import LaunchError
    from app.redis import connect, redacted
    from app.registry import Registry
    from app.roles import Role

    url = settings.redis.broker_url
    cache = connect(settings.redis.cache, TIMEOUT_S, name="trivet-status", connections=4)
    broker = connect(url, TIMEOUT_S, name="trivet-status", connections=4)
    try:
        workers = [await _worker(cache, broker, one) for one in await Registry(cache, TIMEOUT_S).workers()]
        queues = {role.value: await _length(broker, keys.role_queue(role)) for role in Role}
        apis = [json.loads(value) for value in await _values(cache, keys.api("*")) if value is not None]
    except (RedisError, OSError) as error:
        raise LaunchError(f"Redis at {redacted(url)} does not answer: {error}; is `trivet up` running?") from error
    finally:
        await cache.aclose()
        await broker.aclose()
    return {"redis": redacted(url), "workers": workers, "queues": queues, "apis": apis}


async def _worker(cache: Any, broker: Any, record: Any) -> dict[str, Any]:
    from app import keys

    queued = {role.value: await _length(broker, keys.worker_queue(role, record.id)) for role in sorted(record.roles)}
    return {
        "id": record.id,
        "state": "draining" if record.draining else "ready",
        "roles": sorted(record.roles),
        "model": record.model,
        "in_flight": await _placed(cache, record),
        "running": record.engine.running,
        "waiting": record.engine.waiting,
        "kv_usage": round(record.engine.kv_usage, 4),
        "queued": queued,
        "adapters": record.adapters,
        "adapters_failed": record.adapters_failed,
        "max_adapters": record.engine.max_cpu_loras,
        "uptime_s": round(time.time() - record.started, 1),
        "host": record.host,
        "pid": record.pid,
        "metrics": record.metrics,
    }


async def _placed(cache: Any, record: Any) -> int:
    from app import keys

    ranks = range(record.engine.data_parallel_size)
    counts = [await cache.hget(keys.load(record.id, record.incarnation, rank), "requests") for rank in ranks]
    return sum(int(one or 0) for one in counts)


async def _length(broker: Any, queue: str) -> int:
    from app import keys

    return sum([await broker.llen(key) for key in keys.lists(queue)])


async def _values(cache: Any, pattern: str) -> list[Any]:
    names = sorted([key async for key in cache.scan_iter(pattern, count=500)])
    return list(await cache.mget(names)) if names else []


def _of_up(state: State) -> dict[str, Any]:
    processes = [
        {"name": one.name, "state": one.phase.value, "restarts": one.restarts, "pid": one.pid, "log": str(one.log)}
        for one in state.components
    ]
    return {
        "name": state.name,
        "state": state.phase.value,
        "topology": state.topology,
        "model": state.model,
        "supervisor": state.pid,
        "api": state.api_url,
        "flower": state.flower_url,
        "processes": processes,
    }


def _print(found: dict[str, Any]) -> None:
    console = output.console()
    print(f"Redis {found['redis']}")
    if found["workers"]:
        console.print(_workers(found["workers"]))
        for one in found["workers"]:
            print(f"{one['id']}: {one['model']}, process {one['pid']} on {one['host']}, {one['metrics']}")
            _print_adapters(one)
    else:
        print("no workers")
    print("queues of the roles: " + ", ".join(f"{role} {length}" for role, length in found["queues"].items()))
    for one in found["apis"] or [None]:
        print(f"API {one['id']}: {one['in_flight']} in flight, process {one['pid']}" if one else "no API process")
    if (up := found["up"]) is not None:
        print(f"up '{up['name']}' is {up['state']}: {up['topology']}, API {up['api']}, supervisor {up['supervisor']}")
        console.print(_processes(up["processes"]))


def _print_adapters(worker: dict[str, Any]) -> None:
    if held := worker["adapters"]:
        print(f"{worker['id']}: holds adapters {', '.join(held)}; {worker['max_adapters']} is most")
    for adapter, reason in sorted(worker["adapters_failed"].items()):
        print(f"{worker['id']}: lacks adapter {adapter}: {reason}")


def _workers(workers: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    headings = ("worker", "state", "roles", "in flight", "running", "waiting", "KV", "queued", "up")
    table = Table(*headings, box=None, pad_edge=False)
    for one in workers:
        numbers = [str(one[key]) for key in ("in_flight", "running", "waiting")]
        queued = " ".join(f"{role} {length}" for role, length in one["queued"].items() if length) or "0"
        tail = [f"{one['kv_usage']:.1%}", queued, f"{one['uptime_s']:.0f} s"]
        table.add_row(one["id"], one["state"], ",".join(one["roles"]), *numbers, *tail)
    return table


def _processes(processes: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("process", "state", "restarts", "pid", "log", box=None, pad_edge=False)
    for one in processes:
        table.add_row(one["name"], one["state"], str(one["restarts"]), str(one["pid"]), one["log"])
    return table
