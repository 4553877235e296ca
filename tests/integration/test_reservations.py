"""app.routing.reservations: what is placed always is the sum of the places, whatever happens in whatever order."""

import asyncio
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from app import keys
from app.messages.plans import Assignment, Plan
from app.redis import connect
from app.registry import Fleet
from app.routing import Ask, Reservations
from tests.messages import AGG, DECODE, ENCODE, PREFILL
from tests.routing import API, SPLIT, TWO_AGG, D, E, P, alive, ask, load, loads, requests, roomy, router, sums

LEASE_S = 0.0
APIS = ("api-1", "api-2", "api-3")


@dataclass
class Placed:
    ask: Ask
    plan: Plan
    fleet: Fleet


class Life(RuleBasedStateMachine):
    """Requests of three API processes over workers of all kinds that restart."""

    url = ""

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.redis = connect(self.url, 5.0, name="test")
        self.do(self.redis.flushall())
        self.reservations = {api: Reservations(self.redis, LEASE_S) for api in APIS}
        self.router = router(self.redis)
        self.incarnations = dict.fromkeys(("agg", "p0", "p1", "d0", "d1", "e"), 0)
        self.placed: dict[tuple[str, str], Placed] = {}
        for api in APIS:
            self.do(self.redis.set(keys.api(api), "{}"))
        self.announce()

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @property
    def fleet(self) -> Fleet:
        roles = {"agg": (E, P, D), "p0": (P,), "p1": (P,), "d0": (D,), "d1": (D,), "e": (E,)}
        named = ((name, Assignment(worker=name, incarnation=str(n))) for name, n in self.incarnations.items())
        return Fleet(tuple(roomy(assignment, *roles[name]) for name, assignment in named))

    def announce(self) -> None:
        self.do(alive(self.redis, self.fleet))

    @rule(
        api=st.sampled_from(APIS),
        number=st.integers(0, 5),
        blocks=st.integers(0, 60),
        tenant=st.sampled_from(["", "a", "b"]),
        items=st.sets(st.sampled_from(["a" * 32, "b" * 32, "c" * 32])),
    )
    def plan(self, api: str, number: int, blocks: int, tenant: str, items: set[str]) -> None:
        asked = ask(f"r{number}", blocks, number, owner=api, tenant=tenant, items=tuple(sorted(items)))
        decision = self.do(self.router.plan(self.fleet, asked))
        self.placed[api, asked.request_id] = Placed(asked, decision.plan, self.fleet)
        assert self.where(api, asked.request_id, decision.plan.prefill)

    @rule(data=st.data(), twice=st.booleans())
    def hand_off(self, data: st.DataObject, twice: bool) -> None:
        key, one = self.some(data)
        if one is None or one.plan.aggregated:
            return
        for _ in range(1 + twice):
            decision = self.do(self.router.hand_off(self.fleet, one.ask, one.plan))
        assert decision.plan.decode is not None and self.where(*key, decision.plan.decode)
        assert not self.where(*key, one.plan.prefill)

    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        (api, request), _ = self.some(data)
        self.do(self.reservations[api].prefilled(api, request))

    @rule(data=st.data())
    def encoded(self, data: st.DataObject) -> None:
        (api, request), one = self.some(data)
        if one is not None and one.plan.encode:
            self.do(self.reservations[api].release(api, request, data.draw(st.sampled_from(sorted(one.plan.encode)))))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        (api, request), _ = self.some(data)
        self.do(self.reservations[api].release(api, request))
        self.placed.pop((api, request), None)
        assert not self.do(self.redis.hexists(keys.placed(api), request))

    @rule(name=st.sampled_from(["agg", "p0", "p1", "d0", "d1", "e"]))
    def worker_restarts(self, name: str) -> None:
        self.incarnations[name] += 1
        self.announce()
        new = Assignment(worker=name, incarnation=str(self.incarnations[name]))
        assert self.do(load(self.redis, new)) == {}

    @rule(api=st.sampled_from(APIS))
    def api_dies(self, api: str) -> None:
        self.do(self.redis.delete(keys.api(api)))
        for _ in range(3):
            self.do(self.reservations[APIS[0]].reap())
        assert not self.do(self.redis.exists(keys.placed(api)))
        self.placed = {key: one for key, one in self.placed.items() if key[0] != api}
        self.do(self.redis.set(keys.api(api), "{}"))

    @rule(api=st.sampled_from(APIS), data=st.data())
    def sweep(self, api: str, data: st.DataObject) -> None:
        known = {request for owner, request in self.placed if owner == api}
        running = data.draw(st.sets(st.sampled_from(sorted(known)))) if known else set()
        for _ in range(2):
            self.do(self.reservations[api].sweep(api, running))
        left = {one.decode() for one in self.do(self.redis.hkeys(keys.placed(api)))}
        assert left <= running
        self.placed = {key: one for key, one in self.placed.items() if key[0] != api or key[1] in running}

    @rule()
    def redis_restarts_empty(self) -> None:
        self.do(self.redis.flushall())
        for api in APIS:
            self.do(self.redis.set(keys.api(api), "{}"))
        self.announce()

    @invariant()
    def loads_are_the_sums_of_the_places(self) -> None:
        if hasattr(self, "loop"):
            found = self.do(loads(self.redis))
            assert {key: {k: v for k, v in one.items() if v} for key, one in found.items()} == {
                key: {k: v for k, v in one.items() if v} for key, one in self.do(sums(self.redis)).items()
            }

    def some(self, data: st.DataObject) -> tuple[tuple[str, str], Placed | None]:
        """A request that is or was placed, or never was."""
        unknown = [(api, f"r{n}") for api in APIS for n in range(2)]
        key = data.draw(st.sampled_from(sorted(self.placed) + unknown))
        return key, self.placed.get(key)

    def where(self, api: str, request: str, worker: Assignment) -> bool:
        return request in self.do(self.reservations[api].placed_on(api, worker))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for api, request in self.placed:
                self.do(self.reservations[api].release(api, request))
            for api in APIS:
                for _ in range(2):
                    self.do(self.reservations[api].sweep(api, ()))
            assert self.do(loads(self.redis)) == {}, "everything ended, and something is left"
            self.do(self.redis.aclose())
            self.loop.close()


def test_whatever_happens(redis_url: str) -> None:
    Life.url = redis_url
    # Making a failure smaller would take minutes.
    phases = [hypothesis.Phase.reuse, hypothesis.Phase.generate]
    chosen = hypothesis.settings(max_examples=40, stateful_step_count=40, phases=phases)
    run_state_machine_as_test(Life, settings=chosen)  # type: ignore[no-untyped-call]


async def test_a_released_reservation_is_gone_and_may_be_released_again(redis: Any) -> None:
    made, reservations = router(redis), Reservations(redis, 10)
    await made.plan(SPLIT, ask("r"))
    await made.plan(SPLIT, ask("another"))
    for _ in range(2):
        await reservations.release(API, "r")
        assert await requests(redis, PREFILL) == [1]


async def test_what_is_prefilled_counts_as_that_no_more(redis: Any) -> None:
    one, reservations = Fleet(TWO_AGG.workers[:1]), Reservations(redis, 10)
    await router(redis).plan(one, ask("r", 10, tenant="t"))
    before = await load(redis, AGG)
    assert (before["prefilling"], before["prefill_tokens"]) == (1, 161)
    for _ in range(2):
        await reservations.prefilled(API, "r")
        assert await load(redis, AGG) == before | {"prefilling": 0, "prefill_tokens": 0}
    await reservations.prefilled(API, "nobody")


async def test_a_late_release_of_an_incarnation_leaves_the_next_one_alone(redis: Any) -> None:
    made, reservations = router(redis), Reservations(redis, 10)
    again = AGG.model_copy(update={"incarnation": "a2"})
    await made.plan(Fleet((roomy(AGG, P, D),)), ask("r1"))
    await made.plan(Fleet((roomy(again, P, D),)), ask("r2"))
    await reservations.release(API, "r1")
    assert await requests(redis, AGG, again) == [0, 1]


async def test_who_is_placed_on_a_worker(redis: Any) -> None:
    await alive(redis, SPLIT)
    made, reservations = router(redis), Reservations(redis, 10)
    fleet = Fleet((*SPLIT.workers[1:], roomy(PREFILL, P), roomy(ENCODE, E)))
    for n in range(3):
        asked = ask(f"r{n}", items=("a" * 32,))
        plan = (await made.plan(fleet, asked)).plan
        if n:
            await made.hand_off(fleet, asked, plan)
    assert await reservations.placed_on(API, PREFILL) == ["r0"]
    assert sorted(await reservations.placed_on(API, DECODE)) == ["r1", "r2"]
    assert await reservations.placed_on(API, ENCODE) == [], "whoever waits for an item notices by itself"
    assert await reservations.placed_on("api-2", DECODE) == []


async def test_an_api_is_given_time_and_then_cleared_bit_by_bit(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.routing.reservations.REAPED_AT_ONCE", 10)
    made, patient, hasty = router(redis), Reservations(redis, 3600), Reservations(redis, 0)
    for n in range(25):
        await made.plan(TWO_AGG, ask(f"r{n}", number=n))
    await redis.set(keys.api(API), "{}")
    assert [await hasty.reap() for _ in range(3)] == [0, 0, 0], "it lives"
    await redis.delete(keys.api(API))
    assert [await patient.reap() for _ in range(3)] == [0, 0, 0], "it may be back"
    await redis.set(keys.api(API), "{}")
    assert await hasty.reap() == 0 and await redis.zscore(keys.OWNERS, API) == 0, "it is"
    await redis.delete(keys.api(API))
    assert [await hasty.reap() for _ in range(5)] == [0, 10, 10, 5, 0]
    assert await redis.keys("trivet:[lpo][owl]*") == []


async def test_a_place_of_no_request_is_swept(redis: Any) -> None:
    made, reservations = router(redis), Reservations(redis, 10)
    for n in range(3):
        await made.plan(TWO_AGG, ask(f"r{n}"))
    assert await reservations.sweep(API, ["r0"]) == 0, "the answer may be on its way"
    assert await reservations.sweep(API, ["r0", "r1"]) == 1
    assert {one.decode() for one in await redis.hkeys(keys.placed(API))} == {"r0", "r1"}


async def test_a_load_is_named_as_everywhere_else(redis: Any) -> None:
    """The scripts write the key's name themselves."""
    await router(redis).plan(Fleet(TWO_AGG.workers[:1]), ask("r"))
    assert list(await loads(redis)) == [keys.load(AGG.worker, AGG.incarnation, 0)]
