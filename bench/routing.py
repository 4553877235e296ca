"""How long a routing decision takes: 16 workers, prompts of 1,000 blocks and 4 pictures, a million blocks in Redis.

    python -m bench.routing [--decisions 2000]

Decisions are timed from the call to the answer, one after another, in three ways in turn: by cost, for the least loaded
worker, and a PING, which is what any round trip costs there. Beside them another process is the load: decisions of
another API at a steady rate, and engines that store and drop blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from app import keys
from app.redis import connect
from app.registry import EngineState, Fleet, WorkerRecord
from app.roles import ALL
from app.routing import Ask, RedisRouter, Reservations, View, blocks
from app.settings_sections import RoutingSettings
from tests.redis_server import redis_server

FINGERPRINT = "f" * 32
BLOCK_SIZE = 16
PROMPTS = 100
#: Requests that an API process has placed at a time.
IN_FLIGHT = 50


def fleet(workers: int) -> Fleet:
    engine = EngineState(vllm="0", max_model_len=1 << 20, block_size=BLOCK_SIZE, kv_tokens=BLOCK_SIZE << 20)
    records = [
        WorkerRecord(
            id=f"agg@gpu{n}", incarnation=f"{n:012x}", roles=ALL, model="m", multimodal=True, pid=1, host="h",
            concurrency=512, metrics="", fingerprint=FINGERPRINT, spliceable=True, engine=engine, started=0.0,
        )
        for n in range(workers)
    ]  # fmt: skip
    return Fleet(tuple(records))


def prompt(number: int, length: int) -> View:
    """Ten prompts in a row have their first half in common."""
    rng = random.Random(number // 10)
    tokens = [rng.randrange(100_000) for _ in range(length * BLOCK_SIZE // 2)]
    rng = random.Random(-1 - number)
    tokens += [rng.randrange(100_000) for _ in range(length * BLOCK_SIZE - len(tokens) + 7)]
    return View(tuple(blocks.chain(tokens, BLOCK_SIZE)), len(tokens))


def asks(args: argparse.Namespace, owner: str) -> Iterator[Ask]:
    """Requests without end, over the same prompts for all owners."""
    views = [prompt(number, args.blocks) for number in range(PROMPTS)]
    rng = random.Random(owner)
    while True:
        chosen = rng.randrange(PROMPTS)
        items = tuple(f"{chosen * args.pictures + at:032x}" for at in range(args.pictures))
        yield Ask(f"{rng.getrandbits(64):x}", time.time() + 600, owner, items, FINGERPRINT, views[chosen])


async def fill(redis: Any, args: argparse.Namespace) -> float:
    """What workers hold, of these prompts and of others. Answers the bytes that Redis takes for a block."""
    rng, seen = random.Random(7), fleet(args.workers)
    before = (await redis.info("memory"))["used_memory"]
    for one in seen.workers:
        held = [name for n in rng.sample(range(PROMPTS), PROMPTS // 8) for name in prompt(n, args.blocks).blocks]
        names = [*held[: args.held // args.workers // 2], *(_name(rng) for _ in range(args.held // args.workers))]
        for start in range(0, len(names), 1000):
            await redis.sadd(keys.kv(one.id, 0), *names[start : start + 1000])
    total = sum([await redis.scard(keys.kv(one.id, 0)) for one in seen.workers])
    each = ((await redis.info("memory"))["used_memory"] - before) / total
    for n in range(PROMPTS * args.pictures):
        for one in rng.sample(seen.workers, 2):
            holder = {"incarnation": one.incarnation, "descriptor": {"metadata": "x" * 400, "nbytes": 4 << 20}}
            await redis.hset(keys.embedding(FINGERPRINT, f"{n:032x}"), one.id, json.dumps(holder))
    print(f"{total} names of blocks, {each:.0f} bytes each")
    return each


def _name(rng: random.Random) -> str:
    return f"{rng.getrandbits(64):016x}"


class Api:
    """An API process that has `IN_FLIGHT` requests placed at a time."""

    def __init__(self, redis: Any, args: argparse.Namespace, owner: str) -> None:
        self._fleet, self._asks, self._placed = fleet(args.workers), asks(args, owner), deque[Ask]()
        self._reservations = Reservations(redis, 10.0)
        self._by_cost = RedisRouter(redis, RoutingSettings(timeout_s=60), 60.0)
        self._simple = RedisRouter(redis, RoutingSettings(policy="least_loaded"), 60.0)
        self._redis = redis

    async def ping(self) -> float:
        started = time.perf_counter()
        await self._redis.ping()
        return time.perf_counter() - started

    async def decide(self, simple: bool = False) -> float:
        ask = next(self._asks)
        router = self._simple if simple else self._by_cost
        started = time.perf_counter()
        await router.plan(self._fleet, ask)
        took = time.perf_counter() - started
        self._placed.append(ask)
        if len(self._placed) > IN_FLIGHT:
            gone = self._placed.popleft()
            await self._reservations.release(gone.owner, gone.request_id)
        return took


async def _load(url: str, args: argparse.Namespace) -> None:
    redis = connect(url, 60.0, name="bench-load")
    api, rng = Api(redis, args, "load"), random.Random(3)
    seen, stored = fleet(args.workers), deque[tuple[str, list[str]]]()
    while True:
        await api.decide()
        key, names = keys.kv(rng.choice(seen.workers).id, 0), [_name(rng) for _ in range(100)]
        await redis.sadd(key, *names)
        stored.append((key, names))
        if len(stored) > 100:
            key, names = stored.popleft()
            await redis.srem(key, *names)
        await asyncio.sleep(1 / args.load)


def load(url: str, args: argparse.Namespace) -> None:
    """`args.load` decisions a second, and a hundred blocks that are stored, and dropped, with each."""
    asyncio.run(_load(url, args))


async def measure(url: str, args: argparse.Namespace) -> dict[str, list[float]]:
    redis = connect(url, 60.0, name="bench")
    await fill(redis, args)
    beside = multiprocessing.get_context("spawn").Process(target=load, args=(url, args), daemon=True)
    beside.start()
    api = Api(redis, args, "api")
    took: dict[str, list[float]] = {"by cost": [], "least loaded": [], "PING": []}
    try:
        while not await redis.exists(keys.placed("load")):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for _ in range(args.decisions):
            took["by cost"].append(await api.decide())
            took["least loaded"].append(await api.decide(simple=True))
            took["PING"].append(await api.ping())
            await asyncio.sleep(0.005)
        assert beside.is_alive(), "the load ended"
    finally:
        beside.terminate()
        await redis.aclose()
    return took


def table(took: dict[str, list[float]]) -> str:
    lines = ["| decision | p50 ms | p90 ms | p99 ms |", "| --- | --- | --- | --- |"]
    for name, times in took.items():
        ordered = sorted(times)
        cells = [f"{ordered[int(len(ordered) * share)] * 1000:.2f}" for share in (0.5, 0.9, 0.99)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("workers", 16), ("blocks", 1000), ("held", 1_000_000), ("pictures", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--load", type=int, default=50, help="decisions a second beside")
    args = parser.parse_args()
    with redis_server() as server:
        print(table(asyncio.run(measure(server.url, args))))


if __name__ == "__main__":
    main()
