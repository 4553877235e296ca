"""The policies of app.routing.router, and the order of those who wait, in a real Redis."""

from collections import Counter
from typing import Any

import pytest

from app import keys
from app.messages.plans import Assignment
from app.registry import Fleet
from app.roles import ALL
from app.routing import Reservations
from tests.messages import AGG, DECODE
from tests.routing import (
    API,
    OTHER_AGG,
    OTHER_DECODE,
    SPLIT,
    TWO_AGG,
    TWO_SPLIT,
    alive,
    ask,
    hold,
    requests,
    roomy,
    router,
    view,
)

FOUR = [Assignment(worker=f"agg@{n}", incarnation="i") for n in range(4)]
FLEET = Fleet(tuple(roomy(one, *ALL) for one in FOUR))


async def place(redis: Any, one: Assignment, number: int, **tenants: int) -> None:
    counted = {f"tenant:{name}": count for name, count in tenants.items()}
    totals = {"requests": number, "prefilling": 0, "prefill_tokens": 0, "kv_blocks": 0}
    await redis.hset(keys.load(one.worker, one.incarnation), mapping=totals | counted)


@pytest.mark.parametrize("policy", ["kv", "round_robin", "random", "least_loaded", "power_of_two", "sticky"])
async def test_each_policy_places_and_explains(redis: Any, policy: str) -> None:
    await alive(redis, SPLIT)
    made = router(redis, policy=policy)
    for n in range(8):
        decision = await made.plan(FLEET, ask(f"r{n}", 5, n, session=f"s{n}"))
        assert (decision.reasons.policy, decision.reasons.fallback) == (policy, "")
        assert decision.reasons.chosen.worker == decision.plan.prefill.worker
        assert (decision.reasons.chosen.cost is not None) == (policy in ("kv", "sticky"))
    assert sum(await requests(redis, *FOUR)) == 8
    plan = (await made.plan(SPLIT, ask("two"))).plan
    assert (await made.hand_off(SPLIT, ask("two"), plan)).plan.decode == DECODE


async def test_round_robin_takes_turns_over_all_api_processes(redis: Any) -> None:
    await hold(redis, FOUR[0], view(1, 50))
    routers = [router(redis, policy="round_robin") for _ in range(2)]
    chosen = [(await routers[n % 2].plan(FLEET, ask(f"r{n}", 50, 1))).plan.prefill for n in range(8)]
    assert chosen == FOUR * 2
    await routers[0].explain(FLEET, ask("r"))
    assert (await routers[0].plan(FLEET, ask("r8"))).plan.prefill == FOUR[0], "an explanation is no turn"


async def test_round_robin_hands_over_in_turn(redis: Any) -> None:
    await alive(redis, TWO_SPLIT)
    made, chosen = router(redis, policy="round_robin"), []
    for n in range(4):
        plan = (await made.plan(TWO_SPLIT, ask(f"r{n}"))).plan
        chosen.append((await made.hand_off(TWO_SPLIT, ask(f"r{n}"), plan)).plan.decode)
    assert chosen == [DECODE, OTHER_DECODE] * 2


async def test_random_asks_nobody(redis: Any) -> None:
    await place(redis, FOUR[0], 100)
    made, chosen = router(redis, policy="random"), Counter[str]()
    for n in range(200):
        chosen[(await made.explain(FLEET, ask(f"r{n}"))).chosen.worker] += 1
    assert len(chosen) == 4 and min(chosen.values()) > 20


async def test_the_least_loaded_has_the_fewest_requests(redis: Any) -> None:
    for one, number in zip(FOUR, (3, 1, 2, 1), strict=True):
        await place(redis, one, number)
    await hold(redis, FOUR[0], view(1, 50))
    made = router(redis, policy="least_loaded")
    chosen = {(await made.explain(FLEET, ask(f"r{n}", 50, 1))).chosen.worker for n in range(40)}
    assert chosen == {FOUR[1].worker, FOUR[3].worker}


async def test_the_better_of_two_is_never_the_worst(redis: Any) -> None:
    for at, one in enumerate(FOUR):
        await place(redis, one, at)
    made, chosen = router(redis, policy="power_of_two"), Counter[str]()
    for n in range(300):
        chosen[(await made.explain(FLEET, ask(f"r{n}"))).chosen.worker] += 1
    # Of the six pairs 3, 2, 1 and 0 have it as the better one.
    assert chosen[FOUR[0].worker] > chosen[FOUR[1].worker] > chosen[FOUR[2].worker] > 0 == chosen[FOUR[3].worker]


async def test_a_session_stays_where_it_was(redis: Any) -> None:
    made = router(redis, policy="sticky", max_queue=8)
    first = (await made.plan(TWO_AGG, ask("r0", 10, 0, session="s"))).plan.prefill
    other = OTHER_AGG if first == AGG else AGG
    await hold(redis, other, view(1, 50))
    assert (await made.plan(TWO_AGG, ask("r1", 50, 1, session="s"))).plan.prefill == first
    assert (await made.plan(TWO_AGG, ask("r2", 50, 1))).plan.prefill == other, "without a session by cost"
    assert (await made.plan(TWO_AGG, ask("r3", 50, 1, session="s", tenant="t"))).plan.prefill == other
    for n in range(10):
        await made.plan(TWO_AGG, ask(f"more{n}", 1, n + 2, session="s"))
    assert (await made.plan(TWO_AGG, ask("r4", 50, 1, session="s"))).plan.prefill == other, "it had too much to do"


async def test_a_session_whose_worker_is_gone_finds_another(redis: Any) -> None:
    made = router(redis, policy="sticky")
    first = (await made.plan(TWO_AGG, ask("r0", session="s"))).plan.prefill
    rest = Fleet(tuple(one for one in TWO_AGG.workers if one.assignment != first))
    second = (await made.plan(rest, ask("r1", session="s"))).plan.prefill
    assert second != first
    assert (await made.plan(TWO_AGG, ask("r2", session="s"))).plan.prefill == second
    assert 0 < await redis.ttl(keys.session("", "s")) <= 600


@pytest.mark.parametrize(
    ("placed", "tenants", "tenant", "priority", "step"),
    [
        (7, {"": 7}, "", 0, 0),  # not as many as it runs at once
        (7, {"": 7}, "", 9, 0),
        (8, {"": 8}, "", 0, 0),  # nobody to be fair to
        (8, {"": 8}, "", 1, 5),
        (8, {"a": 8}, "a", 0, 0),
        (8, {"a": 7, "b": 1}, "a", 0, 5),
        (8, {"a": 7, "b": 1}, "b", 0, 0),
        (8, {"a": 7, "b": 1}, "c", 0, 0),  # its first
        (8, {"a": 7, "b": 1}, "a", -1, 5),  # no priority buys more than a share
        (11, {"a": 5, "b": 6}, "a", 0, 0),  # exactly its share
        (11, {"a": 5, "b": 6}, "b", 0, 5),
    ],
)
async def test_who_has_more_than_a_fair_share_waits(
    redis: Any, placed: int, tenants: dict[str, int], tenant: str, priority: int, step: int
) -> None:
    """A test's worker runs 8 requests at once."""
    await place(redis, AGG, placed, **tenants)
    one = Fleet(TWO_AGG.workers[:1])
    decision = await router(redis).plan(one, ask("r", tenant=tenant, priority=priority))
    assert decision.step == step in keys.PRIORITY_STEPS


async def test_a_hand_over_has_a_step_too(redis: Any) -> None:
    await alive(redis, SPLIT)
    made = router(redis)
    plan = (await made.plan(SPLIT, ask("r", priority=1))).plan
    await place(redis, DECODE, 8, a=8)
    assert (await made.hand_off(SPLIT, ask("r", priority=1), plan)).step == 5


async def test_tenants_are_counted_while_they_are_placed(redis: Any) -> None:
    made, one = router(redis), Fleet(TWO_AGG.workers[:1])
    for n, tenant in enumerate(("a", "a", "b", "")):
        await made.plan(one, ask(f"r{n}", tenant=tenant))
    await Reservations(redis, 10).release(API, "r2")
    found = await redis.hgetall(keys.load(AGG.worker, AGG.incarnation))
    assert {key: value for key, value in found.items() if key.startswith(b"tenant")} == {
        b"tenant:a": b"2",
        b"tenant:": b"1",
    }
