"""api.placement, through the pipeline: a request goes where its adapter is held, and keeps no place for nobody."""

import asyncio
from typing import Any

import pytest

from app import fleet as fleet_module
from app import keys
from app.errors.adapters import AdapterMissing
from app.messages.tasks import DecodeTask
from tests.integration.fake_api import agg, answer, hold, job, serving, split
from tests.integration.fake_worker import silence
from tests.messages import AGG
from tests.polling import until
from tests.routing import OTHER_AGG

SQL = "sql@v1"


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


@pytest.mark.parametrize("stage", [0, 1], ids=["prefill", "decode"])
async def test_a_stage_without_the_adapter_is_no_way(redis: Any, stage: int) -> None:
    workers = split(redis)
    hold(workers[stage], SQL)
    async with serving(redis, *workers) as api:
        with pytest.raises(AdapterMissing) as caught:
            await answer(api, job(adapter=SQL))
        assert caught.value.failure().retry_after_s
        assert not workers[0].taken and not workers[1].taken
        assert await answer(api, job("base")) == [0, 1, 2, 3, 4]


async def test_an_adapter_published_a_moment_ago_is_found(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "REFRESH_S", 60.0)
    one = agg(redis)
    async with serving(redis) as api, one.running():
        await api.fleet.refresh()
        hold(one, SQL)
        await one.registry.announce(one.record)
        assert api.fleet.now.workers[0].adapters == []
        assert await answer(api, job(adapter=SQL)) == [0, 1, 2, 3, 4]


async def test_a_caller_that_leaves_at_any_moment_keeps_no_place(redis: Any) -> None:
    async with serving(redis, agg(redis, silence)) as api:
        for turns in range(40):
            leaving = asyncio.create_task(answer(api, job(f"r{turns}")))
            for _ in range(turns):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving], timeout=5)
            assert leaving.cancelled()

        async def nothing_held() -> bool:
            return not await redis.exists(keys.load(AGG.worker, AGG.incarnation))

        await until(nothing_held, "the last place's being given back")
        await api.clean(AGG)
