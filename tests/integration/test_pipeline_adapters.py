"""api.pipeline: a request for an adapter runs where that is held, or not at all."""

import asyncio
from typing import Any

import pytest

from app import fleet as fleet_module
from app.errors.adapters import AdapterMissing
from app.errors.base import RemoteFailure
from app.messages.deltas import Delta
from app.messages.tasks import DecodeTask, PrefillTask
from tests.integration.fake_api import agg, answer, job, serving, split
from tests.integration.fake_worker import FakeWorker, count
from tests.messages import AGG
from tests.routing import OTHER_AGG

SQL = "sql@v1"


def hold(one: FakeWorker, *adapters: str) -> None:
    one.record = one.record.model_copy(update={"adapters": list(adapters)})


async def refuse(one: FakeWorker, task: DecodeTask) -> None:
    """As a worker does that let the adapter go a moment ago."""
    error = AdapterMissing("not here").failure()
    one.tokens.put(task.api, Delta(request=task.request_id, attempt=task.attempt, seq=0, error=error))


async def test_only_who_holds_the_adapter_gets_its_requests(redis: Any) -> None:
    with_it, without = agg(redis), agg(redis, assignment=OTHER_AGG)
    hold(with_it, SQL)
    async with serving(redis, with_it, without) as api:
        answers = await asyncio.gather(*(answer(api, job(f"r{n}", adapter=SQL)) for n in range(8)))
        assert answers == [[0, 1, 2, 3, 4]] * 8
        assert len(with_it.taken) == 8 and not without.taken
        assert all(isinstance(one, DecodeTask) and one.adapter == SQL for one in with_it.taken)
        await asyncio.gather(*(answer(api, job(f"b{n}")) for n in range(8)))
        assert without.taken
        await api.clean(AGG, OTHER_AGG)


async def test_both_stages_hear_of_it(redis: Any) -> None:
    prefill, decode = split(redis)
    hold(prefill, SQL)
    hold(decode, SQL)
    async with serving(redis, prefill, decode) as api:
        assert await answer(api, job(adapter=SQL)) == [0, 1, 2, 3, 4]
        (first,), (second,) = prefill.taken, decode.taken
        assert isinstance(first, PrefillTask) and isinstance(second, DecodeTask)
        assert first.adapter == second.adapter == SQL


@pytest.mark.parametrize("stage", [0, 1], ids=["prefill", "decode"])
async def test_a_stage_without_it_is_no_way(redis: Any, stage: int) -> None:
    workers = split(redis)
    hold(workers[stage], SQL)
    async with serving(redis, *workers) as api:
        with pytest.raises(AdapterMissing) as caught:
            await answer(api, job(adapter=SQL))
        assert caught.value.failure().retry_after_s
        assert not workers[0].taken and not workers[1].taken
        assert await answer(api, job("base")) == [0, 1, 2, 3, 4]


async def test_what_was_published_a_moment_ago_is_found(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "REFRESH_S", 60.0)
    one = agg(redis)
    async with serving(redis) as api, one.running():
        await api.fleet.refresh()
        hold(one, SQL)
        await one.registry.announce(one.record)
        assert api.fleet.now.workers[0].adapters == []
        assert await answer(api, job(adapter=SQL)) == [0, 1, 2, 3, 4]


async def test_one_that_was_refused_goes_to_another_worker(redis: Any) -> None:
    asked: list[FakeWorker] = []

    async def refuse_once(one: FakeWorker, task: DecodeTask) -> None:
        asked.append(one)
        await (refuse if len(asked) == 1 else count)(one, task)

    workers = agg(redis, refuse_once), agg(redis, refuse_once, OTHER_AGG)
    for one in workers:
        hold(one, SQL)
    async with serving(redis, *workers, migration_limit=1) as api:
        assert await answer(api, job(adapter=SQL)) == [0, 1, 2, 3, 4]
        assert {one.assignment for one in asked} == {AGG, OTHER_AGG}


async def test_one_that_all_refuse_ends_with_an_error(redis: Any) -> None:
    one = agg(redis, refuse)
    hold(one, SQL)
    async with serving(redis, one, migration_limit=1) as api:
        with pytest.raises(RemoteFailure) as caught:
            await answer(api, job(adapter=SQL))
        assert (caught.value.code, caught.value.status, len(one.taken)) == ("adapter_missing", 503, 2)
        await api.clean(AGG)
