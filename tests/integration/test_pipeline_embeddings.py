"""api.pipeline with models that make embeddings: one task, one delta, and no word of anybody else's model."""

import asyncio
from typing import Any

import pytest

from api.job import Job
from app import cancellation, keys
from app.errors.requests import WrongEndpoint
from app.messages.deltas import Delta
from app.messages.plans import Assignment
from app.messages.prompts import Prompt
from app.messages.tasks import EmbedTask
from app.roles import Does, Role
from tests.integration.fake_api import agg, answer, job, serving
from tests.integration.fake_worker import FakeWorker, silence
from tests.messages import AGG
from tests.polling import until

VECTOR = b"\x00\x00\x80?" * 128
OTHER = Assignment(worker="agg@gpu1", incarnation="b1")


async def make(one: FakeWorker, task: EmbedTask) -> None:
    """The prompt's vector, always the same."""
    delta = Delta(request=task.request_id, attempt=task.attempt, seq=0, vector=VECTOR, cached_tokens=2)
    delta.finish_reason = "stop"
    one.tokens.put(task.api, delta)


def embedder(redis: Any, stage: Any = make, assignment: Assignment = AGG) -> FakeWorker:
    made = FakeWorker(redis, assignment, (Role.PREFILL, Role.DECODE), stage)
    made.record = made.record.model_copy(update={"does": Does.EMBED, "multimodal": False})
    return made


def embedding(request_id: str = "r", **changes: Any) -> Job:
    return job(request_id, does=Does.EMBED, **{"params": {"dimensions": 32, "use_activation": None}} | changes)


async def test_a_prompt_becomes_a_vector_in_one_task(redis: Any) -> None:
    one = embedder(redis)
    async with serving(redis, one) as api:
        asked = embedding(prompt=Prompt(token_ids=[5, 6, 7], cache_salt="s"), priority=3)
        deltas = [delta async for some in api.pipeline.stream(asked) for delta in some]
        assert [(one.vector, one.cached_tokens, one.finish_reason) for one in deltas] == [(VECTOR, 2, "stop")]
        (task,) = one.taken
        assert isinstance(task, EmbedTask)
        assert (task.prompt, task.params, task.priority) == (asked.prompt, asked.params, 3)
        assert task.plan.aggregated and task.plan.prefill == AGG
        await api.clean(AGG)
        assert not await cancellation.is_cancelled(redis, "r"), "a finished request needs no tombstone"


async def test_equal_prompts_spread_over_the_workers(redis: Any) -> None:
    """By load alone: what one worker holds of a prompt draws no other there."""
    gate = asyncio.Event()

    async def late(one: FakeWorker, task: EmbedTask) -> None:
        await gate.wait()
        await make(one, task)

    first, second = embedder(redis, late), embedder(redis, late, OTHER)
    async with serving(redis, first, second) as api:
        prompt = Prompt(token_ids=[1] * 64)
        running = [asyncio.ensure_future(answer(api, embedding(f"r{n}", prompt=prompt))) for n in range(8)]
        await until(lambda: len(first.taken) + len(second.taken) == 8, "the tasks")
        assert (len(first.taken), len(second.taken)) == (4, 4)
        load = await redis.hgetall(keys.load(AGG.worker, AGG.incarnation))
        assert load[b"prefill_tokens"] == b"256", "no answer of tokens is expected"
        gate.set()
        await asyncio.gather(*running)
        await api.clean(AGG, OTHER)


async def test_a_client_that_leaves_stops_it(redis: Any) -> None:
    one = embedder(redis, silence)
    async with serving(redis, one) as api:
        running = asyncio.ensure_future(answer(api, embedding()))
        await until(lambda: one.taken, "the task")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: one.cancelled == ["r"], "the cancellation")
        await api.clean(AGG)


async def test_another_worker_makes_it_when_the_first_dies(redis: Any) -> None:
    async def die(one: FakeWorker, task: EmbedTask) -> None:
        await one.die()

    first, second = embedder(redis, die), embedder(redis, make, OTHER)
    second.record = second.record.model_copy(update={"draining": True})
    async with serving(redis, first, second, migration_limit=1) as api:
        running = asyncio.ensure_future(answer(api, embedding()))
        await until(lambda: first.taken, "the task")
        second.record = second.record.model_copy(update={"draining": False})
        assert await running == [0]
        assert [task.request_id for task in second.taken] == ["r~"]


@pytest.mark.parametrize("does", list(Does))
async def test_a_model_that_does_something_else_is_not_asked(redis: Any, does: Does) -> None:
    """An API with other settings than the workers."""
    one = agg(redis) if does is Does.EMBED else embedder(redis)
    async with serving(redis, one) as api:
        with pytest.raises(WrongEndpoint, match=f"do not {does}"):
            await answer(api, embedding() if does is Does.EMBED else job())
        assert one.taken == []
        await api.clean(AGG)
