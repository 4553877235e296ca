"""api.pipeline with its real router, sender, reader and fleet on a real Redis, and workers that lack only an engine."""

import asyncio
import time
from typing import Any

import pytest

from app import cancellation, keys
from app.errors.serving import EngineFailed
from app.messages.deltas import Delta, TokenLogprob
from app.messages.plans import Assignment, Plan
from app.messages.prompts import Prompt, RenderedPrompt
from app.messages.tasks import DecodeTask, PrefillTask
from tests.integration.fake_api import API, agg, answer, failure, job, serving, split
from tests.integration.fake_worker import FakeWorker, hand_on, silence
from tests.messages import AGG, DECODE, PREFILL, media_ref
from tests.polling import until


async def test_a_request_on_one_worker(redis: Any) -> None:
    one = agg(redis)
    async with serving(redis, one) as api:
        media = [media_ref()]
        asked = job(prompt=Prompt(token_ids=[1], media=media, cache_salt="s"), priority=3, reasoning_ended=True)
        assert await answer(api, asked) == list(range(5))
        (task,) = one.taken
        assert isinstance(task, DecodeTask) and task.kv is None
        assert (task.prompt, task.params, task.deadline) == (asked.prompt, asked.params, asked.deadline)
        assert (task.priority, task.reasoning_ended, task.api, task.plan.decode) == (3, True, API, AGG)
        await api.clean(AGG)
        assert not await cancellation.is_cancelled(redis, "r"), "a finished request needs no tombstone"


async def test_a_request_over_two_workers(redis: Any) -> None:
    prefill, decode = split(redis)
    async with serving(redis, prefill, decode) as api:
        assert await answer(api, job()) == list(range(5))
        (first,), (second,) = prefill.taken, decode.taken
        assert isinstance(first, PrefillTask) and isinstance(second, DecodeTask)
        assert isinstance(second.prompt, RenderedPrompt) and second.kv is not None
        await api.clean(PREFILL, DECODE)
        assert not await cancellation.is_cancelled(redis, "r")


async def test_what_the_prefill_worker_says_of_the_prompt_comes_first(redis: Any) -> None:
    scores: Any = [None, [TokenLogprob(2, -0.5)]]

    async def score(one: FakeWorker, task: PrefillTask) -> None:
        one.tokens.put(task.api, Delta(request=task.request_id, seq=0, prompt_logprobs=scores))
        await one.tokens.flushed(task.api)
        await until(lambda: heard, "the delta")
        assert api.reader.streams[0].workers == {PREFILL}, "it still depends on this worker"
        await hand_on(one, task, seq=1)

    async def speak(one: FakeWorker, task: DecodeTask) -> None:
        one.say(task, task.seq, finish_reason="stop")

    heard: list[Delta] = []
    async with serving(redis, *split(redis, score, speak)) as api:
        async for deltas in api.pipeline.stream(job()):
            heard += deltas
        assert [(one.seq, one.prompt_logprobs) for one in heard] == [(0, scores), (1, None)]
        await api.clean(PREFILL, DECODE)


async def test_who_asks_for_timings_hears_of_the_plan(redis: Any) -> None:
    plans: list[Plan] = []
    prefill, decode = split(redis)
    async with serving(redis, prefill, decode) as api:
        await answer(api, job("timed", on_plan=plans.append))
        await answer(api, job("plain"))
        assert [(plan.prefill, plan.decode) for plan in plans] == [(PREFILL, None), (PREFILL, DECODE)]
        assert [task.timings for task in decode.taken if isinstance(task, DecodeTask)] == [True, False]


async def test_64_requests_at_once(redis: Any) -> None:
    other = Assignment(worker="agg@gpu9", incarnation="x")
    workers = agg(redis), agg(redis, assignment=other)
    async with serving(redis, *workers) as api:
        answers = await asyncio.gather(*(answer(api, job(f"r{n}", tokens=n + 1)) for n in range(64)))
        assert answers == [list(range(n + 1)) for n in range(64)]
        assert sorted(len(one.taken) for one in workers) == [32, 32]
        await api.clean(AGG, other)


async def test_the_first_token_does_not_wait_for_the_second(redis: Any) -> None:
    release = asyncio.Event()

    async def two(one: FakeWorker, task: DecodeTask) -> None:
        one.say(task, 0)
        await release.wait()
        one.say(task, 1, finish_reason="stop")

    async with serving(redis, agg(redis, two)) as api:
        stream = api.pipeline.stream(job())
        assert [delta.seq for delta in await asyncio.wait_for(anext(stream), 5)] == [0]
        release.set()
        assert [delta.seq for delta in await asyncio.wait_for(anext(stream), 5)] == [1]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_an_error_of_the_worker_is_raised_as_it_was(redis: Any) -> None:
    async def fail(one: FakeWorker, task: DecodeTask) -> None:
        one.say(task, 0)
        sent = EngineFailed("the engine burns", param="messages").failure()
        one.tokens.put(task.api, Delta(request=task.request_id, attempt=task.attempt, seq=1 << 31, error=sent))

    async with serving(redis, agg(redis, fail)) as api:
        raised = await failure(api, job())
        assert raised.failure() == EngineFailed("the engine burns", param="messages").failure()
        await api.clean(AGG)


async def test_the_deadline_ends_it_here_and_there(redis: Any) -> None:
    one = agg(redis, silence)
    async with serving(redis, one) as api:
        began = time.monotonic()
        raised = await failure(api, job(seconds=0.5))
        assert (raised.code, raised.status) == ("deadline_exceeded", 504)
        assert 0.4 < time.monotonic() - began < 3
        await api.clean(AGG)
        await until(lambda: one.cancelled == ["r"], "the worker's being told")
        assert await cancellation.is_cancelled(redis, "r")


async def test_a_deadline_that_has_passed(redis: Any) -> None:
    async with serving(redis, agg(redis, silence)) as api:
        assert (await failure(api, job(seconds=-1))).code == "deadline_exceeded"
        await api.clean(AGG)


async def test_a_caller_that_leaves_cancels_it_everywhere(redis: Any) -> None:
    async def first_token(one: FakeWorker, task: DecodeTask) -> None:
        one.say(task, 0)

    one = agg(redis, first_token)
    async with serving(redis, one) as api:
        stream = api.pipeline.stream(job())
        await asyncio.wait_for(anext(stream), 5)
        assert await redis.hget(keys.load(AGG.worker, AGG.incarnation), "requests") == b"1"
        await stream.aclose()
        await api.clean(AGG)
        await until(lambda: one.cancelled == ["r"], "the worker's being told")
        assert await cancellation.is_cancelled(redis, "r")


async def test_a_caller_that_is_cancelled_while_it_waits(redis: Any) -> None:
    one = agg(redis, silence)
    async with serving(redis, one) as api:
        waiting = asyncio.create_task(answer(api, job()))
        await until(lambda: one.taken, "the task")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await api.clean(AGG)
        await until(lambda: one.cancelled == ["r"], "the worker's being told")
