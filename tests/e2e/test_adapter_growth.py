"""A hundred adapters that come and go, on a real engine: nothing of them is left."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from app import keys
from app.adapters.intake import WEIGHTS
from tests.adapters import make_adapter
from tests.e2e import adapters
from tests.e2e.adapters import Expected, ask, eventually, load, unload
from tests.e2e.stack import MODEL, Stack

LOADS = 100
#: Until then pools, caches and the allocator have what they keep.
WARM = 20
#: As large as the engine takes, so that what stays shows.
RANK = 16
#: Connections and threads come and go with load.
SLACK = 5


@dataclass(frozen=True)
class Footprint:
    """Of a process: bytes in memory, open files, and threads."""

    rss: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        process = psutil.Process(pid)
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads())


def footprints(stack: Stack) -> dict[str, Footprint]:
    """Of the worker, with its engine, and of the API."""
    with stack.redis as redis:
        known = [json.loads(redis.get(key) or "{}").get("pid", 0) for key in redis.keys(keys.api("*"))]
    (api,) = filter(psutil.pid_exists, known)  # others that tests had are known for some seconds after their end
    return {"worker": Footprint.of(stack.workers()["agg"].pid), "API": Footprint.of(api)}


def events(stack: Stack) -> dict[str, float]:
    names = ("loaded", "let_go", "failed")
    return {name: stack.counter("agg", "trivet_adapters_total", f'event="{name}"') for name in names}


def remembered(stack: Stack) -> set[tuple[str, bytes]]:
    """(key, field) of what Redis knows of adapters: for some minutes, loads of other tests that failed, too."""
    with stack.redis as redis:
        assert not [*redis.scan_iter(keys.lora_users(MODEL, "*"))]
        known = [keys.lora(MODEL), keys.lora_loads(MODEL)]
        return {(key, field) for key in known for field in redis.hkeys(key)}


def test_a_hundred_loads_and_unloads(agg: Stack, merged: Expected, model: Path) -> None:
    """Each of other content: so the cache on the disk has to send some away."""
    turning = adapters.root() / "turning"
    before, counted, known = footprints(agg), events(agg), remembered(agg)
    for number in range(LOADS):
        make_adapter(turning, model, rank=RANK, seed=1000 + number)
        load(agg, "turning")
        if number % 10 == 0:
            ask(agg, "turning", "text", tokens=4)
        unload(agg, "turning")
        if number == WARM:
            before = footprints(agg)
    eventually(lambda: agg.counter("agg", "trivet_adapters_held") == 0, 30, "the engine lets the last one go")
    counted = {name: count - counted[name] for name, count in events(agg).items()}
    assert counted == {"loaded": LOADS, "let_go": LOADS, "failed": 0}
    _has_not_grown(before, footprints(agg), (LOADS - WARM) * (turning / WEIGHTS).stat().st_size)
    worker = agg.workers()["agg"]
    assert (worker.adapters, worker.adapters_failed, worker.engine.resident_loras) == ([], {}, [])
    assert not [*adapters.cache().glob("staging/*"), *adapters.cache().glob("flights/*")]
    kept = sum(one.stat().st_size for one in adapters.cache().glob("versions/*/*"))
    assert 0 < kept <= float(os.environ["TRIVET_ADAPTERS__CACHE_GB"]) * 1e9
    assert remembered(agg) <= known
    # Every place in the engine is free, and what it computes with is as it was.
    for name in ("one", "two", "three", "four"):
        load(agg, name, "sql")
        assert ask(agg, name, "text").same_as(merged["sql"]["text"])
    assert ask(agg, MODEL, "image").same_as(merged[MODEL]["image"])
    adapters.clear(agg)


def _has_not_grown(before: dict[str, Footprint], after: dict[str, Footprint], weight: int) -> None:
    """By less than the adapters since then weigh, and by no file or thread for each."""
    for name, was in before.items():
        now = after[name]
        assert now.rss - was.rss < weight, (name, was, now, weight)
        assert now.files - was.files <= SLACK and now.threads - was.threads <= SLACK, (name, was, now)
