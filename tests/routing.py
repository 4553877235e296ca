"""What the tests of routing share: fleets, asks, and a look at what is reserved."""

import json
import time
from collections import Counter
from typing import Any

from app import keys
from app.messages.plans import Assignment
from app.registry import Fleet, WorkerRecord
from app.roles import ALL, Role
from app.routing import Ask, RedisRouter, View
from app.settings_sections import RoutingSettings
from tests.messages import AGG, DECODE, ENCODE, ENGINE, FINGERPRINT, PREFILL, worker

E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE
API = "api-1"
BLOCK = ENGINE.block_size
CLAIM_S = 60.0
ITEM, OTHER_ITEM = "a" * 32, "b" * 32

OTHER_AGG = Assignment(worker="agg@gpu1", incarnation="a2")
OTHER_DECODE = Assignment(worker="decode@gpu2", incarnation="d2")
OTHER_ENCODE = Assignment(worker="encode@gpu5", incarnation="e2")
OTHER_PREFILL = Assignment(worker="prefill@gpu3", incarnation="p2")

ROOMY = ENGINE.model_copy(update={"kv_tokens": 1_000_000})


def roomy(assignment: Assignment, *roles: Role, **changes: Any) -> WorkerRecord:
    """A worker whose KV cache is not filled by a test."""
    return worker(assignment, *roles, **{"engine": ROOMY} | changes)


TWO_AGG = Fleet((roomy(AGG, *ALL), roomy(OTHER_AGG, *ALL)))
SPLIT = Fleet((roomy(PREFILL, E, P), roomy(DECODE, D)))
MIXED = Fleet((roomy(AGG, *ALL), roomy(PREFILL, E, P), roomy(DECODE, D)))
E_P_D = Fleet((roomy(ENCODE, E), roomy(OTHER_ENCODE, E), roomy(PREFILL, P), roomy(DECODE, D)))
TWO_SPLIT = Fleet(
    (roomy(PREFILL, E, P), roomy(OTHER_PREFILL, E, P), roomy(DECODE, D), roomy(OTHER_DECODE, D)),
)


def view(number: int, blocks: int, more: int = 1) -> View:
    """Prompt `number`, which shares no block with others; `more` tokens follow its last full block."""
    return View(tuple(f"{number:08x}{at:08x}" for at in range(blocks)), blocks * BLOCK + more)


def ask(request_id: str = "r", blocks: int = 0, number: int = 0, **changes: Any) -> Ask:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "deadline": time.time() + 60,
        "owner": API,
        "fingerprint": FINGERPRINT,
        "view": view(number, blocks),
    }
    return Ask(**fields | changes)


#: For tests that say on which side of a balance a request falls.
WEIGHTS = {"prefill_load_scale": 4.0, "queue_weight": 0.5, "transfer_weight": 0.1, "embedding_weight": 0.25}


def router(redis: Any, **settings: Any) -> RedisRouter:
    """Decisions may take as long as a busy machine needs."""
    return RedisRouter(redis, RoutingSettings(**WEIGHTS | {"timeout_s": 30.0} | settings), CLAIM_S)


async def hold(redis: Any, one: Assignment, of: View, blocks: int | None = None, rank: int = 0) -> None:
    """The worker's engine has the first blocks of a prompt."""
    await redis.sadd(keys.kv(one.worker, rank), *of.blocks[:blocks])


async def alive(redis: Any, fleet: Fleet) -> None:
    for one in fleet.workers:
        await redis.set(keys.worker(one.id), one.model_dump_json(), ex=60)


async def requests(redis: Any, *workers: Assignment) -> list[int]:
    """How many are placed on each."""
    found = [await redis.hget(keys.load(one.worker, one.incarnation), "requests") for one in workers]
    return [int(one or 0) for one in found]


async def load(redis: Any, one: Assignment, rank: int = 0) -> dict[str, int]:
    found = await redis.hgetall(keys.load(one.worker, one.incarnation, rank))
    return {name.decode(): int(value) for name, value in found.items()}


async def sums(redis: Any) -> dict[str, dict[str, int]]:
    """What the loads of all workers should be: the sums of the places of all requests."""
    totals: dict[str, Counter[str]] = {}
    async for placed in redis.scan_iter(keys.placed("*")):
        for text in (await redis.hgetall(placed)).values():
            for place in json.loads(text)["places"].values():
                key = keys.load(place["worker"], place["incarnation"], place["rank"])
                counted = {name: place[name] for name in ("prefilling", "prefill_tokens", "kv_blocks")} | {
                    "requests": 1
                }
                if "tenant" in place:
                    counted[f"tenant:{place['tenant']}"] = 1
                totals.setdefault(key, Counter()).update(counted)
    return {key: dict(total) for key, total in totals.items()}


async def loads(redis: Any) -> dict[str, dict[str, int]]:
    """What they are."""
    found = {}
    async for key in redis.scan_iter(f"{keys.PREFIX}load:*"):
        found[key.decode()] = {name.decode(): int(value) for name, value in (await redis.hgetall(key)).items()}
    return found
