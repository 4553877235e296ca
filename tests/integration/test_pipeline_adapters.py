"""api.pipeline: both stages of a request hear of its adapter, and one that let it go is not the last word."""

from typing import Any

import pytest

from app.errors.adapters import AdapterMissing
from app.errors.base import RemoteFailure
from app.messages.deltas import Delta
from app.messages.tasks import DecodeTask, PrefillTask
from tests.integration.fake_api import agg, answer, hold, job, serving, split
from tests.integration.fake_worker import FakeWorker, count
from tests.messages import AGG
from tests.routing import OTHER_AGG

SQL = "sql@v1"


async def refuse(one: FakeWorker, task: DecodeTask) -> None:
    """As a worker does that let the adapter go a moment ago."""
    error = AdapterMissing("not here").failure()
    one.tokens.put(task.api, Delta(request=task.request_id, attempt=task.attempt, seq=0, error=error))


async def test_both_stages_hear_of_it(redis: Any) -> None:
    prefill, decode = split(redis)
    hold(prefill, SQL)
    hold(decode, SQL)
    async with serving(redis, prefill, decode) as api:
        assert await answer(api, job(adapter=SQL)) == [0, 1, 2, 3, 4]
        (first,), (second,) = prefill.taken, decode.taken
        assert isinstance(first, PrefillTask) and isinstance(second, DecodeTask)
        assert first.adapter == second.adapter == SQL


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
