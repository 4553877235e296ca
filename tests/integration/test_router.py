"""app.routing.router: its scripts in a real Redis."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from app import keys
from app.errors.serving import BrokerUnavailable, NoWorker
from app.messages.plans import Plan
from app.redis import connect
from app.registry import Fleet
from app.roles import ALL
from app.routing import Reservations, View
from tests.messages import AGG, DECODE, ENCODE, FINGERPRINT, PREFILL, descriptor
from tests.redis_server import redis_server
from tests.routing import (
    API,
    BLOCK,
    E_P_D,
    ITEM,
    MIXED,
    OTHER_AGG,
    OTHER_DECODE,
    OTHER_ENCODE,
    OTHER_ITEM,
    OTHER_PREFILL,
    ROOMY,
    SPLIT,
    TWO_AGG,
    TWO_SPLIT,
    D,
    E,
    P,
    alive,
    ask,
    hold,
    load,
    loads,
    requests,
    roomy,
    router,
    sums,
    view,
)


@pytest.mark.parametrize("fleet", [TWO_AGG, Fleet(TWO_AGG.workers[::-1])], ids=["in order", "reversed"])
async def test_requests_that_arrive_together_spread(redis: Any, fleet: Fleet) -> None:
    made = router(redis)
    decisions = await asyncio.gather(*(made.plan(fleet, ask(f"r{n}", number=n)) for n in range(64)))
    assert Counter(one.plan.decode for one in decisions) == {AGG: 32, OTHER_AGG: 32}
    assert all(one.plan.aggregated for one in decisions)
    assert await requests(redis, AGG, OTHER_AGG) == [32, 32]


async def test_all_api_processes_count_alike(redis: Any, redis_url: str) -> None:
    client = connect(redis_url, 5.0, name="another API")
    routers = [router(redis), router(client)]
    await asyncio.gather(
        *(routers[n % 2].plan(TWO_AGG, ask(f"r{n}", number=n, owner=f"api-{n % 2}")) for n in range(64))
    )
    assert await requests(redis, AGG, OTHER_AGG) == [32, 32]
    await client.aclose()


async def test_both_halves_of_a_split_spread_by_themselves(redis: Any) -> None:
    await alive(redis, TWO_SPLIT)
    made = router(redis)

    async def both(n: int) -> Plan:
        asked = ask(f"r{n}", number=n)
        decision = await made.plan(TWO_SPLIT, asked)
        assert decision.plan.decode is None
        return (await made.hand_off(TWO_SPLIT, asked, decision.plan)).plan

    plans = await asyncio.gather(*(both(n) for n in range(64)))
    assert Counter(plan.decode for plan in plans) == {DECODE: 32, OTHER_DECODE: 32}
    assert 16 <= Counter(plan.prefill for plan in plans)[PREFILL] <= 48
    assert await requests(redis, PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE) == [0, 0, 32, 32]


async def test_the_first_of_equals_is_not_always_the_same(redis: Any) -> None:
    made, chosen = router(redis), set()
    for n in range(40):
        chosen.add((await made.plan(TWO_AGG, ask(f"r{n}", number=n))).plan.decode)
        await Reservations(redis, 10).release(API, f"r{n}")
    assert chosen == {AGG, OTHER_AGG}


async def test_the_holder_of_a_prefix_is_chosen_until_it_has_too_much_to_do(redis: Any) -> None:
    held = view(1, 100)
    await hold(redis, OTHER_AGG, held, 80)
    made = router(redis)
    decision = await made.plan(TWO_AGG, ask("r", 100, 1))
    assert decision.plan.prefill == OTHER_AGG
    assert [(one.worker, one.held, one.chosen) for one in decision.reasons.candidates] == [
        (AGG.worker, 0, False),
        (OTHER_AGG.worker, 80, True),
    ]
    assert (await load(redis, OTHER_AGG))["prefill_tokens"] == 20 * BLOCK + 1
    for n in range(20):
        await made.plan(Fleet(TWO_AGG.workers[1:]), ask(f"other{n}", 100, n + 2))
    assert (await made.plan(TWO_AGG, ask("r2", 100, 1))).plan.prefill == AGG


@pytest.mark.parametrize("blocks", [1, 2, 3, 15, 16, 17, 100, 1000])
async def test_a_prefix_of_any_length_is_found(redis: Any, blocks: int) -> None:
    made = router(redis)
    asked = ask("r", blocks, 1)
    for held in {0, 1, blocks // 2, blocks - 1, blocks}:
        await redis.flushall()
        if held:
            await hold(redis, AGG, asked.view, held)
        found = (await made.explain(TWO_AGG, asked)).candidates
        assert [one.held for one in found] == [held, 0]


async def test_prompts_that_arrive_before_their_first_event_go_together(redis: Any) -> None:
    made = router(redis, max_queue=1000)
    first, second, longer = ask("r1", 200, 1), ask("r2", 200, 1), ask("r3", 0)
    longer = replace(longer, view=View((*first.view.blocks, *view(2, 100).blocks), 300 * BLOCK))
    chosen = (await made.plan(TWO_AGG, first)).plan.prefill
    again = await made.plan(TWO_AGG, second)
    assert again.plan.prefill == chosen
    assert max(one.predicted for one in again.reasons.candidates) == 200
    found = {one.worker: one.predicted for one in (await made.explain(TWO_AGG, longer)).candidates}
    assert 200 * 7 / 8 <= found[chosen.worker] <= 200 and min(found.values()) == 0


async def test_a_prediction_is_forgotten(redis: Any) -> None:
    made = router(redis, predicted_ttl_s=1)
    await made.plan(TWO_AGG, ask("r", 10, 1))
    keys_now = [key async for key in redis.scan_iter(keys.PREFIX + "predicted:*")]
    assert len(keys_now) == 1 and 0 < await redis.ttl(keys_now[0]) <= 2


async def test_predictions_take_no_more_room_than_they_may(redis: Any) -> None:
    made, one = router(redis, max_blocks_per_worker=100, ttl_s=1000, kv_events=False), Fleet(TWO_AGG.workers[:1])
    for n in range(50):
        await made.plan(one, ask(f"r{n}", 20, n))
    sizes = [await redis.scard(key) async for key in redis.scan_iter(keys.PREFIX + "predicted:*")]
    assert len(sizes) == 2 and max(sizes) <= 100
    found = (await made.explain(one, ask("again", 20, 49))).candidates
    assert found[0].predicted == 20, "the latest are there"


async def test_without_events_what_is_held_does_not_count(redis: Any) -> None:
    await hold(redis, AGG, view(1, 10))
    (one, _) = (await router(redis, kv_events=False).explain(TWO_AGG, ask("r", 10, 1))).candidates
    assert (one.held, one.predicted) == (0, 0)


async def test_a_queue_bound_makes_a_second_holder(redis: Any) -> None:
    """A prompt that everybody sends."""
    made = router(redis, max_queue=4, prefill_load_scale=1000.0)
    await hold(redis, AGG, view(1, 100))
    plans = [(await made.plan(TWO_AGG, ask(f"r{n}", 100, 1))).plan for n in range(6)]
    assert [plan.prefill for plan in plans] == [AGG] * 4 + [OTHER_AGG] * 2
    await Reservations(redis, 10).prefilled(API, "r0")
    decision = await made.plan(TWO_AGG, ask("r7", 100, 1))
    assert decision.plan.prefill == AGG
    swamped = {one.worker: one.overloaded for one in (await made.explain(TWO_AGG, ask("r8", 100, 1))).candidates}
    assert swamped == {AGG.worker: True, OTHER_AGG.worker: False}


async def test_a_full_kv_cache_is_left_alone(redis: Any) -> None:
    small = roomy(AGG, *ALL).model_copy(update={"engine": roomy(AGG).engine.model_copy(update={"kv_tokens": 1600})})
    fleet = Fleet((small, roomy(OTHER_AGG, *ALL)))
    made = router(redis, prefill_load_scale=1000.0)
    await hold(redis, AGG, view(1, 90))
    assert (await made.plan(fleet, ask("r1", 90, 1))).plan.prefill == AGG
    assert (await made.plan(fleet, ask("r2", 90, 1))).plan.prefill == OTHER_AGG


async def test_a_temperature_lets_others_have_a_turn(redis: Any) -> None:
    await hold(redis, AGG, view(1, 50))
    made, chosen = router(redis, temperature=1.0), Counter[str]()
    for n in range(200):
        chosen[(await made.explain(TWO_AGG, ask(f"r{n}", 50, 1))).chosen.worker] += 1
    # Two candidates are a whole range apart: e to 1.
    assert 0.6 < chosen[AGG.worker] / 200 < 0.86


async def test_prefill_goes_where_the_embeddings_are(redis: Any) -> None:
    holder = json.dumps({"incarnation": OTHER_AGG.incarnation, "descriptor": descriptor(9 << 20).model_dump()})
    await redis.hset(keys.embedding(FINGERPRINT, ITEM), OTHER_AGG.worker, holder)
    asked = ask("r", 10, 1, items=(ITEM, OTHER_ITEM))
    found = (await router(redis).explain(TWO_AGG, asked)).candidates
    assert [one.embedding_bytes >> 20 for one in found] == [9 + 4, 4] and found[1].chosen
    await redis.hset(
        keys.embedding(FINGERPRINT, ITEM), OTHER_AGG.worker, holder.replace(OTHER_AGG.incarnation, "before")
    )
    found = (await router(redis).explain(TWO_AGG, asked)).candidates
    assert [one.embedding_bytes >> 20 for one in found] == [9 + 4, 9 + 4]


async def test_prefill_goes_where_an_item_is_being_encoded(redis: Any) -> None:
    await redis.set(keys.encoding(FINGERPRINT, ITEM), OTHER_AGG.model_dump_json())
    found = (await router(redis).explain(TWO_AGG, ask("r", items=(ITEM,)))).candidates
    assert [one.chosen for one in found] == [False, True]


async def test_requests_for_a_new_item_go_together(redis: Any) -> None:
    made = router(redis)
    first = (await made.plan(TWO_AGG, ask("r1", items=(ITEM,)))).plan
    await Reservations(redis, 10).release(API, "r1")
    assert {(await made.explain(TWO_AGG, ask(f"r{n}", items=(ITEM,)))).chosen.worker for n in range(8)} == {
        first.prefill.worker
    }


async def test_decode_goes_where_blocks_need_not_be_sent(redis: Any) -> None:
    await alive(redis, TWO_SPLIT)
    asked = ask("r", 100, 1)
    await hold(redis, OTHER_DECODE, asked.view, 50)
    made = router(redis)
    plan = (await made.plan(TWO_SPLIT, asked)).plan
    decision = await made.hand_off(TWO_SPLIT, asked, plan)
    assert decision.plan == plan.model_copy(update={"decode": OTHER_DECODE})
    assert decision.reasons.chosen.held == 50
    assert (await made.hand_off(TWO_SPLIT, asked, plan)).plan == decision.plan, "the script may be sent twice"
    assert await requests(redis, PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE) == [0, 0, 0, 1]


async def test_nothing_is_handed_over_to_the_dead(redis: Any) -> None:
    await alive(redis, TWO_SPLIT)
    asked, made = ask("r", 100, 1), router(redis)
    await hold(redis, DECODE, asked.view)
    plan = (await made.plan(TWO_SPLIT, asked)).plan
    reborn = TWO_SPLIT.workers[2].model_copy(update={"incarnation": "later"})
    await redis.set(keys.worker(DECODE.worker), reborn.model_dump_json())
    assert (await made.hand_off(TWO_SPLIT, asked, plan)).plan.decode == OTHER_DECODE
    await redis.delete(keys.worker(OTHER_DECODE.worker))
    with pytest.raises(NoWorker, match="decode"):
        await made.hand_off(TWO_SPLIT, asked, plan)


async def test_a_decode_worker_that_died_after_the_choice_is_replaced(redis: Any) -> None:
    await alive(redis, TWO_SPLIT)
    asked, made = ask("r", 100, 1), router(redis)
    plan = (await made.plan(TWO_SPLIT, asked)).plan
    first = (await made.hand_off(TWO_SPLIT, asked, plan)).plan.decode
    assert first is not None
    await redis.delete(keys.worker(first.worker))
    second = (await made.hand_off(TWO_SPLIT, asked, plan)).plan.decode
    assert second is not None and {first, second} == {DECODE, OTHER_DECODE}
    assert await requests(redis, first, second) == [0, 1]


async def test_a_cancelled_request_is_handed_over_without_a_place(redis: Any) -> None:
    await alive(redis, SPLIT)
    asked, made = ask("r", 10, 1), router(redis)
    plan = (await made.plan(SPLIT, asked)).plan
    await Reservations(redis, 10).release(API, "r")
    await redis.set(keys.cancelled("r"), "1")
    assert (await made.hand_off(SPLIT, asked, plan)).plan.decode == DECODE
    assert await loads(redis) == {}


async def test_a_redis_that_lost_the_place_gets_it_again(redis: Any) -> None:
    asked, made = ask("r", 10, 1), router(redis)
    plan = (await made.plan(SPLIT, asked)).plan
    await redis.flushall()
    await alive(redis, SPLIT)
    await made.hand_off(SPLIT, asked, plan)
    assert await requests(redis, PREFILL, DECODE) == [0, 1]
    assert await Reservations(redis, 10).placed_on(API, DECODE) == ["r"]


@pytest.mark.parametrize(
    ("whole", "prefill", "decode", "split"),
    [(0, 0, 0, False), (1, 0, 0, True), (1, 1, 0, False), (1, 0, 1, False), (2, 1, 1, True), (5, 9, 0, False)],
)
@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
async def test_one_worker_or_two_whichever_waits_less(
    redis: Any, policy: str, whole: int, prefill: int, decode: int, split: bool
) -> None:
    for one, number in ((AGG, whole), (PREFILL, prefill), (DECODE, decode)):
        if number:
            await redis.hset(keys.load(one.worker, one.incarnation), "requests", number)
    asked = replace(ask("r"), view=View(tokens=1000))
    made = router(redis, policy=policy)
    decision = await made.plan(MIXED, asked)
    assert decision.plan == (Plan(prefill=PREFILL) if split else Plan(prefill=AGG, decode=AGG))


@pytest.mark.parametrize(
    ("blocks", "held", "split"), [(32, 0, True), (31, 0, False), (100, 0, True), (100, 79, True), (100, 81, False)]
)
async def test_a_prompt_with_little_to_prefill_stays_on_one_worker(
    redis: Any, blocks: int, held: int, split: bool
) -> None:
    """Although that one has more to do."""
    await redis.hset(keys.load(AGG.worker, AGG.incarnation), mapping={"requests": 5, "kv_blocks": 1000})
    asked = ask("r", blocks, 1)
    if held:
        await hold(redis, AGG, asked.view, held)
    settings = {"local_prefill_max_tokens": 32 * BLOCK - 1 if blocks < 100 else 1, "local_prefill_cached_ratio": 0.8}
    decision = await router(redis, **settings).plan(MIXED, asked)
    assert (decision.plan.decode is None) == split


async def test_a_swamped_worker_takes_no_short_prompt_either(redis: Any) -> None:
    made = router(redis, max_queue=3)
    plans = [(await made.plan(MIXED, ask(f"r{n}", 1, n))).plan for n in range(4)]
    assert [plan.aggregated for plan in plans] == [True, True, True, False]


async def test_media_go_where_they_can_be_encoded(redis: Any) -> None:
    text_only = AGG.model_copy(update={"worker": "text"})
    fleet = Fleet((roomy(text_only, P, D, multimodal=False), roomy(PREFILL, E, P), roomy(DECODE, D)))
    made = router(redis)
    assert (await made.plan(fleet, ask("text"))).plan.decode == text_only
    assert (await made.plan(fleet, ask("media", items=(ITEM,)))).plan == Plan(prefill=PREFILL)


async def test_ranks_are_candidates_of_their_own(redis: Any) -> None:
    engine = roomy(AGG).engine.model_copy(update={"data_parallel_size": 3})
    fleet = Fleet((roomy(AGG, *ALL, engine=engine),))
    await hold(redis, AGG, view(1, 50), rank=2)
    decision = await router(redis).plan(fleet, ask("r", 50, 1))
    assert (decision.plan.prefill_rank, decision.plan.decode_rank, decision.plan.aggregated) == (2, 2, True)
    assert [one.held for one in decision.reasons.candidates] == [0, 0, 50]
    assert (await load(redis, AGG, 2))["requests"] == 1
    split = Fleet((roomy(PREFILL, E, P, engine=engine), roomy(DECODE, D, engine=engine)))
    await alive(redis, split)
    await hold(redis, PREFILL, view(1, 50), rank=1)
    await hold(redis, DECODE, view(1, 50), rank=2)
    plan = (await router(redis).plan(split, ask("s", 50, 1))).plan
    plan = (await router(redis).hand_off(split, ask("s", 50, 1), plan)).plan
    assert (plan.prefill_rank, plan.decode_rank) == (1, 2)


async def test_items_of_a_request_spread_over_encode_workers(redis: Any) -> None:
    items = tuple(f"{n:032x}" for n in range(6))
    made, asked = router(redis), ask("r", items=items)
    plan = (await made.plan(E_P_D, asked)).plan
    assert (plan.prefill, plan.decode, set(plan.encode)) == (PREFILL, None, set(items))
    assert Counter(plan.encode.values()) == {ENCODE: 3, OTHER_ENCODE: 3}
    assert await requests(redis, ENCODE, OTHER_ENCODE, PREFILL, DECODE) == [3, 3, 1, 0]
    claims = [json.loads(await redis.get(keys.encoding(FINGERPRINT, item))) for item in items]
    assert claims == [plan.encode[item].model_dump() | {"request": "r"} for item in items]
    assert 55_000 < await redis.pttl(keys.encoding(FINGERPRINT, items[0])) <= 60_000
    again = (await made.plan(E_P_D, asked)).plan
    assert again.encode == plan.encode, "a request finds its own claims"
    assert await requests(redis, ENCODE, OTHER_ENCODE, PREFILL, DECODE) == [3, 3, 1, 0]
    await Reservations(redis, 10).release(API, "r", items[0], items[1])
    assert sum(await requests(redis, ENCODE, OTHER_ENCODE)) == 4
    await Reservations(redis, 10).release(API, "r")
    assert await loads(redis) == {}


async def test_an_item_goes_to_the_same_one_of_equals(redis: Any) -> None:
    chosen = set()
    for _ in range(8):
        await redis.flushall()
        chosen.add((await router(redis).plan(E_P_D, ask("r", items=(ITEM,)))).plan.encode[ITEM])
    assert len(chosen) == 1


async def test_an_item_is_placed_once(redis: Any) -> None:
    made = router(redis)
    decisions = await asyncio.gather(*(made.plan(E_P_D, ask(f"r{n}", items=(ITEM,))) for n in range(50)))
    assert sum(len(one.plan.encode) for one in decisions) == 1
    await redis.hset(keys.embedding(FINGERPRINT, OTHER_ITEM), "prefill@gpu0", "{}")
    held = (await made.plan(E_P_D, ask("held", items=(OTHER_ITEM,)))).plan
    assert held.encode == {}, "somebody holds it"
    assert sum(await requests(redis, ENCODE, OTHER_ENCODE)) == 1


async def test_a_worker_that_prefills_encodes_for_itself(redis: Any) -> None:
    plan = (await router(redis).plan(SPLIT, ask("r", items=(ITEM,)))).plan
    assert plan.encode == {} and not await redis.exists(keys.encoding(FINGERPRINT, ITEM))


async def test_an_explanation_changes_nothing(redis: Any) -> None:
    explained = await router(redis).explain(E_P_D, ask("r", 10, 1, items=(ITEM,)))
    assert explained.encode[ITEM] in (ENCODE.worker, OTHER_ENCODE.worker)
    assert explained.chosen.worker == PREFILL.worker
    assert await redis.keys("*") == []


@pytest.mark.parametrize(
    ("fleet", "media", "names"),
    [
        (Fleet(), False, ["decode", "prefill"]),
        (Fleet((roomy(PREFILL, E, P),)), True, ["decode"]),
        (Fleet((roomy(DECODE, D),)), True, ["prefill"]),
        (Fleet((roomy(AGG, P, D, multimodal=False),)), True, ["decode", "prefill"]),
        (Fleet((roomy(AGG, *ALL, draining=True),)), False, ["decode", "prefill"]),
    ],
)
async def test_no_worker_names_the_roles(redis: Any, fleet: Fleet, media: bool, names: list[str]) -> None:
    with pytest.raises(NoWorker) as caught:
        await router(redis).plan(fleet, ask("r", items=(ITEM,) if media else ()))
    assert f"for: {', '.join(names)};" in caught.value.message
    assert ("takes media" in caught.value.message) == (media and not fleet.missing(media=False))
    assert caught.value.failure().retry_after_s and caught.value.status == 503
    assert await redis.keys("*") == []


async def test_a_decision_of_the_same_turn_is_the_same(redis: Any) -> None:
    """redis-py sends a script again when the connection broke before the answer came."""
    made, asked = router(redis), ask("r", 10, 1, items=(ITEM,))
    first = await made.plan(E_P_D, asked)
    made._turns = iter([1])  # type: ignore[assignment]
    again = await made.plan(E_P_D, asked)
    assert again.plan == first.plan
    assert await loads(redis) == await sums(redis)
    assert await requests(redis, PREFILL) == [1]


async def test_a_restarted_redis_gets_the_script_again() -> None:
    with redis_server() as server:
        redis = connect(server.url, 2.0, name="test")
        made = router(redis)
        await made.plan(SPLIT, ask("r"))
        server.restart()
        assert (await made.plan(SPLIT, ask("r"))).plan == Plan(prefill=PREFILL)
        server.stop()
        with pytest.raises(BrokerUnavailable):
            await made.plan(SPLIT, ask("r"))
        await redis.aclose()


async def test_a_slow_decision_becomes_a_simple_one(redis: Any) -> None:
    made = router(redis, timeout_s=0.2)
    await redis.client_pause(1000)
    decision = await made.plan(TWO_AGG, ask("r", 10, 1))
    assert (decision.reasons.policy, decision.reasons.fallback) == ("least_loaded", "slow")
    assert sum(await requests(redis, AGG, OTHER_AGG)) == 1, "the late decision came first, or gave way"
    assert (await requests(redis, decision.plan.prefill)) == [1]
    assert await loads(redis) == await sums(redis)


async def test_a_decision_that_fails_becomes_a_simple_one(redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    await redis.set(keys.kv(AGG.worker, 0), "no set")
    decision = await router(redis).plan(TWO_AGG, ask("r", 10, 1))
    assert (decision.reasons.policy, decision.reasons.fallback) == ("least_loaded", "failed")
    assert "WRONGTYPE" in caplog.text
    assert await loads(redis) == await sums(redis)


async def test_a_deadline_long_gone_changes_nothing(redis: Any) -> None:
    """A reservation does not end by age."""
    await router(redis).plan(TWO_AGG, ask("r", deadline=time.time() - 3600))
    assert sum(await requests(redis, AGG, OTHER_AGG)) == 1
    for key in await loads(redis):
        assert await redis.ttl(key) == -1


async def test_an_adapter_goes_where_it_ran_last(redis: Any) -> None:
    empty = ROOMY.model_copy(update={"max_loras": 2})
    resident = empty.model_copy(update={"resident_loras": ["sql@v1"]})
    fleet = Fleet((roomy(AGG, *ALL, engine=empty), roomy(OTHER_AGG, *ALL, engine=resident)))
    routes, reservations = router(redis), Reservations(redis, 10.0)

    async def alone(adapter: str) -> Any:
        found = (await routes.plan(fleet, ask(adapter=adapter))).plan.prefill
        await reservations.release(API, "r")
        return found

    assert {(await alone("sql@v1")).worker for _ in range(8)} == {OTHER_AGG.worker}
    assert {(await alone("sql@v2")).worker for _ in range(8)} == {AGG.worker}, "it has room"
    assert {(await alone("")).worker for _ in range(20)} == {AGG.worker, OTHER_AGG.worker}


async def test_an_adapter_costs_by_what_it_takes_to_bring_it(redis: Any) -> None:
    def fleet(*resident: str) -> Fleet:
        return Fleet(
            (roomy(AGG, *ALL, engine=ROOMY.model_copy(update={"max_loras": 2, "resident_loras": [*resident]})),)
        )

    async def cost(adapter: str, *resident: str) -> float:
        (candidate,) = (
            await router(redis, adapter_weight=5.0).explain(fleet(*resident), ask(adapter=adapter))
        ).candidates
        return candidate.cost or 0.0

    plain = await cost("")
    assert await cost("", "a@1", "b@1") == plain
    assert await cost("a@1", "a@1", "b@1") == plain
    found = [await cost("a@1", *resident) - plain for resident in ((), ("b@1",), ("b@1", "c@1"))]
    assert found == pytest.approx([5.0, 7.5, 10.0])
