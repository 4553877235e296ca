"""What api.services puts together, less HTTP and vLLM, for the tests of the pipeline."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api.job import Job
from api.pipeline import Pipeline
from app import keys
from app.errors.base import RemoteFailure
from app.fleet import FleetView
from app.items.index import ItemIndex
from app.messages.plans import Assignment
from app.messages.prompts import Prompt
from app.registry import Registry
from app.roles import ALL, Role
from app.routing import RedisRouter, Reservations
from app.sender import TaskSender
from app.settings_sections import ItemSettings, RoutingSettings
from app.streaming import TokenReader
from tests.integration.fake_worker import FakeWorker, count, hand_on
from tests.messages import AGG, DECODE, FINGERPRINT, PREFILL
from tests.polling import until

API = "api-1"
E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE


class Api:
    """What api.services puts together, less HTTP and vLLM."""

    def __init__(self, redis: Any, broker: Any = None, migration_limit: int = 0) -> None:
        self.redis = redis
        self.reader = TokenReader(redis, API, 200)
        self.fleet = FleetView(Registry(redis, 2.0), "m", lambda gone: self.pipeline.worker_lost(gone))
        self.router, reservations = RedisRouter(redis, RoutingSettings(), 60.0), Reservations(redis, 2.0)
        sender = TaskSender(broker or redis)
        self.items = ItemIndex(redis, FINGERPRINT, ItemSettings())
        self.pipeline = Pipeline(
            API, "m", self.fleet, self.router, reservations, sender, self.reader, self.items, redis, migration_limit
        )

    async def clean(self, *workers: Assignment) -> None:
        """Nothing of any request is left behind."""
        await self.pipeline.settle(5)
        assert self.reader.streams == []
        for one in workers:
            assert not await self.redis.exists(keys.load(one.worker, one.incarnation)), one
        assert not await self.redis.exists(keys.placed(API))


@asynccontextmanager
async def serving(redis: Any, *workers: FakeWorker, broker: Any = None, migration_limit: int = 0) -> AsyncIterator[Api]:
    api = Api(redis, broker, migration_limit)
    await redis.set(keys.api(API), "alive", ex=60)
    tasks = [asyncio.create_task(api.reader.run()), asyncio.create_task(api.fleet.run())]
    async with contextlib.AsyncExitStack() as stack:
        for one in workers:
            await stack.enter_async_context(one.running())
        await asyncio.wait_for(api.reader.subscribed.wait(), 5)
        await until(lambda: len(api.fleet.now.workers) == len(workers), "the fleet")
        try:
            yield api
            assert not any(task.done() for task in tasks), tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await api.pipeline.settle(5)


def agg(redis: Any, stage: Any = count, assignment: Assignment = AGG) -> FakeWorker:
    return FakeWorker(redis, assignment, tuple(ALL), stage)


def split(redis: Any, prefill: Any = hand_on, decode: Any = count) -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker(redis, PREFILL, (E, P), prefill), FakeWorker(redis, DECODE, (D,), decode)


def job(request_id: str = "r", tokens: int = 5, seconds: float = 30.0, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "prompt": Prompt(token_ids=[1, 2, 3]),
        "params": {"max_tokens": tokens},
        "deadline": time.time() + seconds,
    }
    return Job(**fields | changes)


def hold(one: FakeWorker, *adapters: str) -> None:
    one.record = one.record.model_copy(update={"adapters": list(adapters)})


async def answer(api: Api, asked: Job) -> list[int]:
    async with asyncio.timeout(20):
        return [delta.seq async for deltas in api.pipeline.stream(asked) for delta in deltas]


async def failure(api: Api, asked: Job) -> RemoteFailure:
    with pytest.raises(RemoteFailure) as caught:
        await answer(api, asked)
    return caught.value
