"""app.routing.least_loaded: its script in a real Redis."""

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest

from app import keys
from app.errors import BrokerUnavailable, NoWorker
from app.messages import Assignment, Plan
from app.redis import connect
from app.registry import Fleet
from app.roles import ALL, Role
from app.routing import Ask, LeastLoaded
from tests.messages import AGG, DECODE, FINGERPRINT, PREFILL, worker
from tests.polling import until
from tests.redis_server import redis_server

E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE
OTHER_AGG = Assignment(worker="agg@gpu1", incarnation="a2")
OTHER_DECODE = Assignment(worker="decode@gpu2", incarnation="d2")
OTHER_PREFILL = Assignment(worker="prefill@gpu3", incarnation="p2")

TWO_AGG = Fleet((worker(AGG, *ALL), worker(OTHER_AGG, *ALL)))
SPLIT = Fleet((worker(PREFILL, E, P), worker(DECODE, D)))
MIXED = Fleet((worker(AGG, *ALL), worker(PREFILL, E, P), worker(DECODE, D)))


ITEM, OTHER_ITEM = "a" * 32, "b" * 32
ENCODE = Assignment(worker="encode@gpu4", incarnation="e1")
OTHER_ENCODE = Assignment(worker="encode@gpu5", incarnation="e2")
E_P_D = Fleet((worker(ENCODE, E), worker(OTHER_ENCODE, E), worker(PREFILL, P), worker(DECODE, D)))


def ask(request_id: str, seconds: float = 60.0, media: bool = False, items: tuple[str, ...] = (ITEM,)) -> Ask:
    return Ask(request_id, time.time() + seconds, items if media else (), FINGERPRINT)


async def load(redis: Any, *workers: Assignment) -> list[int]:
    return [await redis.zcard(keys.load(one.worker)) for one in workers]


async def place(redis: Any, one: Assignment, number: int, seconds: float = 60.0) -> None:
    for n in range(number):
        await redis.zadd(keys.load(one.worker), {f"other-{n}": time.time() + seconds})


@pytest.mark.parametrize("fleet", [TWO_AGG, Fleet(TWO_AGG.workers[::-1])], ids=["in order", "reversed"])
async def test_requests_that_arrive_together_spread(redis: Any, fleet: Fleet) -> None:
    router = LeastLoaded(redis, 60.0)
    plans = await asyncio.gather(*(router.plan(fleet, ask(f"r{n}")) for n in range(64)))
    assert Counter(plan.decode for plan in plans) == {AGG: 32, OTHER_AGG: 32}
    assert all(plan.aggregated for plan in plans)
    assert await load(redis, AGG, OTHER_AGG) == [32, 32]


async def test_all_api_processes_count_alike(redis: Any, redis_url: str) -> None:
    client = connect(redis_url, 5.0, name="another API")
    routers = [LeastLoaded(redis, 60.0), LeastLoaded(client, 60.0)]
    await asyncio.gather(*(routers[n % 2].plan(TWO_AGG, ask(f"r{n}")) for n in range(64)))
    assert await load(redis, AGG, OTHER_AGG) == [32, 32]
    await client.aclose()


async def test_both_halves_of_a_split_spread_by_themselves(redis: Any) -> None:
    fleet = Fleet((worker(PREFILL, E, P), worker(OTHER_PREFILL, E, P), worker(DECODE, D), worker(OTHER_DECODE, D)))
    router = LeastLoaded(redis, 60.0)
    plans = await asyncio.gather(*(router.plan(fleet, ask(f"r{n}", media=True)) for n in range(64)))
    assert Counter(plan.prefill for plan in plans) == {PREFILL: 32, OTHER_PREFILL: 32}
    assert Counter(plan.decode for plan in plans) == {DECODE: 32, OTHER_DECODE: 32}


async def test_the_first_of_equals_is_not_always_the_same(redis: Any) -> None:
    router = LeastLoaded(redis, 60.0)
    chosen = set()
    for n in range(40):
        plan = await router.plan(TWO_AGG, ask(f"r{n}"))
        chosen.add(plan.decode)
        await router.release(plan, f"r{n}")
    assert chosen == {AGG, OTHER_AGG}


@pytest.mark.parametrize(
    ("whole", "prefill", "decode", "split"),
    [(0, 0, 0, False), (1, 0, 0, True), (1, 1, 0, False), (1, 0, 1, False), (2, 1, 1, True), (5, 9, 0, False)],
)
async def test_one_worker_or_two_whichever_waits_less(
    redis: Any, whole: int, prefill: int, decode: int, split: bool
) -> None:
    for one, number in ((AGG, whole), (PREFILL, prefill), (DECODE, decode)):
        await place(redis, one, number)
    plan = await LeastLoaded(redis, 60.0).plan(MIXED, ask("r"))
    assert plan == (Plan(prefill=PREFILL, decode=DECODE) if split else Plan(prefill=AGG, decode=AGG))
    added = [whole + (not split), prefill + split, decode + split]
    assert await load(redis, AGG, PREFILL, DECODE) == added


async def test_media_go_where_they_can_be_encoded(redis: Any) -> None:
    text_only = Assignment(worker="text", incarnation="t")
    fleet = Fleet((worker(text_only, P, D, multimodal=False), worker(PREFILL, E, P), worker(DECODE, D)))
    await place(redis, PREFILL, 50)
    router = LeastLoaded(redis, 60.0)
    assert (await router.plan(fleet, ask("text"))).decode == text_only
    assert await router.plan(fleet, ask("media", media=True)) == Plan(prefill=PREFILL, decode=DECODE)


async def test_items_of_a_request_spread_over_encode_workers(redis: Any) -> None:
    items = tuple(f"{n:032x}" for n in range(6))
    router = LeastLoaded(redis, 60.0)
    plan = await router.plan(E_P_D, ask("r", media=True, items=items))
    assert (plan.prefill, plan.decode, set(plan.encode)) == (PREFILL, DECODE, set(items))
    assert Counter(plan.encode.values()) == {ENCODE: 3, OTHER_ENCODE: 3}
    assert await load(redis, ENCODE, OTHER_ENCODE, PREFILL, DECODE) == [3, 3, 1, 1]
    claims = [json.loads(await redis.get(keys.encoding(FINGERPRINT, item))) for item in items]
    assert claims == [plan.encode[item].model_dump() | {"request": "r"} for item in items]
    again = await router.plan(E_P_D, ask("r", media=True, items=items))
    assert again.encode == plan.encode, "the script may be sent twice"
    assert 55_000 < await redis.pttl(keys.encoding(FINGERPRINT, items[0])) <= 60_000
    await router.release(plan, "r")
    assert await load(redis, ENCODE, OTHER_ENCODE, PREFILL, DECODE) == [0, 0, 0, 0]


async def test_an_item_is_placed_once(redis: Any) -> None:
    router = LeastLoaded(redis, 60.0)
    plans = await asyncio.gather(*(router.plan(E_P_D, ask(f"r{n}", media=True)) for n in range(50)))
    assert sum(len(plan.encode) for plan in plans) == 1
    await redis.hset(keys.embedding(FINGERPRINT, OTHER_ITEM), "prefill@gpu0", "{}")
    plan = await router.plan(E_P_D, ask("held", media=True, items=(OTHER_ITEM,)))
    assert plan.encode == {}, "somebody holds it"
    assert sum(await load(redis, ENCODE, OTHER_ENCODE)) == 1


async def test_a_worker_that_prefills_encodes_for_itself(redis: Any) -> None:
    plan = await LeastLoaded(redis, 60.0).plan(SPLIT, ask("r", media=True))
    assert plan.encode == {} and not await redis.exists(keys.encoding(FINGERPRINT, ITEM))


async def test_a_released_reservation_is_gone_and_may_be_released_again(redis: Any) -> None:
    router = LeastLoaded(redis, 60.0)
    plan = await router.plan(SPLIT, ask("r"))
    await router.plan(SPLIT, ask("another"))
    assert await load(redis, PREFILL, DECODE) == [2, 2]
    await router.release(plan, "r")
    await router.release(plan, "r")
    assert await load(redis, PREFILL, DECODE) == [1, 1]


async def test_a_reservation_that_nobody_releases_ends_with_its_deadline(redis: Any) -> None:
    router = LeastLoaded(redis, 60.0)
    await router.plan(TWO_AGG, ask("short", 0.2))
    await router.plan(TWO_AGG, ask("short too", 0.2))
    await asyncio.sleep(0.3)
    # Both are counted out when the next one is placed, so four more are two each.
    plans = [await router.plan(TWO_AGG, ask(f"r{n}")) for n in range(4)]
    assert Counter(plan.decode for plan in plans) == {AGG: 2, OTHER_AGG: 2}
    assert await load(redis, AGG, OTHER_AGG) == [2, 2]


async def test_a_key_lives_as_long_as_its_last_reservation(redis: Any) -> None:
    router, one = LeastLoaded(redis, 60.0), Fleet((worker(AGG, *ALL),))
    await router.plan(one, ask("long", 100))
    await router.plan(one, ask("short", 1))
    assert 99 <= await redis.ttl(keys.load(AGG.worker)) <= 102
    await redis.flushall()
    await router.plan(one, ask("short", 0.1))
    await until(lambda: _gone(redis), "the end of the key", 5)


async def _gone(redis: Any) -> bool:
    return not await redis.exists(keys.load(AGG.worker))


async def test_a_request_past_its_deadline_takes_nobodys_place(redis: Any) -> None:
    router, one = LeastLoaded(redis, 60.0), Fleet((worker(AGG, *ALL),))
    await router.plan(one, ask("long", 100))
    await router.plan(one, ask("over", -50))
    assert await redis.zscore(keys.load(AGG.worker), "long") is not None
    assert await redis.ttl(keys.load(AGG.worker)) > 90


@pytest.mark.parametrize(
    ("fleet", "media", "names"),
    [
        (Fleet(), False, ["decode", "prefill"]),
        (Fleet((worker(PREFILL, E, P),)), True, ["decode"]),
        (Fleet((worker(DECODE, D),)), True, ["prefill"]),
        (Fleet((worker(AGG, P, D, multimodal=False),)), True, ["decode", "prefill"]),
        (Fleet((worker(AGG, *ALL, draining=True),)), False, ["decode", "prefill"]),
    ],
)
async def test_no_worker_names_the_roles(redis: Any, fleet: Fleet, media: bool, names: list[str]) -> None:
    with pytest.raises(NoWorker) as caught:
        await LeastLoaded(redis, 60.0).plan(fleet, ask("r", media=media))
    assert f"for: {', '.join(names)};" in caught.value.message
    assert ("takes media" in caught.value.message) == (media and not fleet.missing(media=False))
    assert caught.value.failure().retry_after_s and caught.value.status == 503
    assert await redis.keys("*") == []


async def test_a_restarted_redis_gets_the_script_again() -> None:
    with redis_server() as server:
        redis = connect(server.url, 2.0, name="test")
        router = LeastLoaded(redis, 60.0)
        await router.plan(SPLIT, ask("r"))
        server.restart()
        assert await router.plan(SPLIT, ask("r")) == Plan(prefill=PREFILL, decode=DECODE)
        server.stop()
        with pytest.raises(BrokerUnavailable):
            await router.plan(SPLIT, ask("r"))
        await redis.aclose()
