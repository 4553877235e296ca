"""The cost of app.routing.router against the same formula in Python, for any loads, caches, weights and prompts."""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import keys
from app.messages.plans import Assignment
from app.redis import connect
from app.registry import Fleet
from app.roles import Role
from app.routing import Explanation
from app.settings_sections import RoutingSettings
from tests.messages import ENGINE, FINGERPRINT, descriptor, worker
from tests.routing import BLOCK, D, P, ask, router, view

PREFIX = 60
KV_TOKENS = 100 * BLOCK
ROLES: dict[str, tuple[Role, ...]] = {"whole": (P, D), "prefill": (P,), "decode": (D,)}

load = st.fixed_dictionaries({
    "requests": st.integers(0, 20),
    "prefilling": st.integers(0, 6),
    "prefill_tokens": st.integers(0, 5000),
    "kv_blocks": st.integers(0, 120),
})  # fmt: skip
candidate = st.tuples(load, st.integers(0, PREFIX), st.booleans())
weights = st.builds(
    RoutingSettings,
    overlap_credit=st.floats(0, 1),
    prefill_load_scale=st.floats(0, 5),
    queue_weight=st.floats(0, 2),
    active_request_weight=st.floats(0, 5),
    transfer_weight=st.floats(0, 1),
    embedding_weight=st.floats(0, 3),
    max_queue=st.integers(1, 6),
    active_decode_blocks_threshold=st.floats(0.1, 1.1),
    local_prefill_max_tokens=st.integers(0, 600),
    local_prefill_cached_ratio=st.floats(0.1, 1),
    expected_output_tokens=st.integers(0, 300),
    timeout_s=st.just(30.0),
)


class Model:
    """A candidate as the formula sees it."""

    def __init__(self, stage: str, name: str, drawn: Any, blocks: int, more: int, answer: int, s: Any) -> None:
        self.stage, self.name = stage, name
        self.load, held, self.embedding = drawn
        self.held = min(held, blocks)
        tokens = blocks * BLOCK + more
        credited = max(0.0, tokens - s.overlap_credit * self.held * BLOCK)
        self.own_tokens = max(0, tokens - self.held * BLOCK)
        own_blocks = max(1, math.ceil((tokens + (0 if stage == "prefill" else answer)) / BLOCK))
        waiting = s.queue_weight * self.load["prefill_tokens"]
        mib = 0 if self.embedding or stage == "decode" else 2
        work = (
            s.transfer_weight * credited if stage == "decode" else s.prefill_load_scale * (waiting + credited)
        ) / BLOCK
        self.cost = (
            work
            + self.load["kv_blocks"]
            + own_blocks
            + s.active_request_weight * self.load["requests"]
            + s.embedding_weight * mib
        )
        self.overloaded = (
            self.load["prefilling"] >= s.max_queue
            or self.load["kv_blocks"] > s.active_decode_blocks_threshold * KV_TOKENS / BLOCK
        )
        self.light = tokens > 0 and (
            self.own_tokens <= s.local_prefill_max_tokens or self.held * BLOCK >= s.local_prefill_cached_ratio * tokens
        )


def calm(models: list[Model]) -> list[Model]:
    return [one for one in models if not one.overloaded]


def stage_of(models: list[Model]) -> set[str]:
    """Which stages may be chosen from: two where the costs are equal but for rounding."""
    whole, prefill, decode = ([one for one in models if one.stage == stage] for stage in ROLES)
    if not whole or not (prefill and decode):
        return {"whole"} if whole else {"prefill"}
    one, two = bool(calm(whole)), bool(calm(prefill) and calm(decode))
    if one != two:
        return {"whole"} if one else {"prefill"}
    if any(each.light for each in whole):
        return {"whole"}
    alone = min(each.cost for each in whole)
    both = max(min(each.cost for each in prefill), min(each.cost for each in decode))
    if math.isclose(alone, both, rel_tol=1e-6):
        return {"whole", "prefill"}
    return {"whole"} if alone < both else {"prefill"}


async def decide(url: str, models: list[Model], asked: Any, chosen: RoutingSettings) -> Explanation:
    redis = connect(url, 5.0, name="test")
    await redis.flushall()
    engine = ENGINE.model_copy(update={"kv_tokens": KV_TOKENS})
    assignments = {one.name: Assignment(worker=one.name, incarnation="i") for one in models}
    holder = f'{{"incarnation":"i","descriptor":{descriptor(2 << 20).model_dump_json()}}}'
    await redis.hset(keys.embedding(FINGERPRINT, "a" * 32), "somebody", holder)
    for one in models:
        await redis.hset(keys.load(one.name, "i"), mapping=one.load)
        if one.held:
            await redis.sadd(keys.kv(one.name, 0), *asked.view.blocks[: one.held])
        if one.embedding:
            await redis.hset(keys.embedding(FINGERPRINT, "a" * 32), one.name, holder)
    fleet = Fleet(tuple(worker(assignments[one.name], *ROLES[one.stage], engine=engine) for one in models))
    try:
        return await router(redis, **chosen.model_dump()).explain(fleet, asked)
    finally:
        await redis.aclose()


@settings(max_examples=150)
@given(
    whole=st.lists(candidate, max_size=4),
    prefill=st.lists(candidate, min_size=1, max_size=4),
    decode=st.lists(candidate, min_size=1, max_size=3),
    blocks=st.integers(0, PREFIX),
    more=st.integers(0, BLOCK - 1),
    max_tokens=st.integers(0, 500),
    chosen=weights,
)
def test_costs_and_choice_are_those_of_the_formula(
    redis_url: str, whole: Any, prefill: Any, decode: Any, blocks: int, more: int, max_tokens: int, chosen: Any
) -> None:
    answer = min(max_tokens or chosen.expected_output_tokens, chosen.expected_output_tokens)
    drawn = (
        [("whole", one) for one in whole] + [("prefill", one) for one in prefill] + [("decode", one) for one in decode]
    )
    models = [Model(stage, f"{stage}@{at}", one, blocks, more, answer, chosen) for at, (stage, one) in enumerate(drawn)]
    asked = ask("r", view=view(1, blocks, more), max_tokens=max_tokens, items=("a" * 32,))
    explained = asyncio.run(decide(redis_url, models, asked, chosen))
    assert explained.fallback == ""
    found = {one.worker: one for one in explained.candidates}
    for one in models:
        assert found[one.name].cost == pytest.approx(one.cost, rel=1e-9)
        assert (found[one.name].held, found[one.name].overloaded) == (one.held, one.overloaded)
    assert explained.chosen.stage in stage_of(models)
    group = [one for one in models if one.stage == explained.chosen.stage]
    best = min(one.cost for one in calm(group) or group)
    cost = next(one for one in group if one.name == explained.chosen.worker)
    assert cost.cost == pytest.approx(best, rel=1e-9) and not (cost.overloaded and calm(group))
