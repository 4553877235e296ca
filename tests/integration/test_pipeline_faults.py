"""api.pipeline when workers die, Redis hangs, restarts or is not there."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from app import cancellation, keys
from app import fleet as fleet_module
from app.errors.base import RemoteFailure
from app.errors.serving import BrokerUnavailable, NoWorker, WorkerLost
from app.messages.deltas import Delta
from app.messages.plans import Assignment
from app.messages.prompts import Prompt
from app.messages.tasks import DecodeTask
from app.redis import connect
from app.routing import Ask
from tests.integration.fake_api import API, agg, answer, failure, job, serving, split
from tests.integration.fake_worker import FakeWorker, count, silence
from tests.messages import AGG, DECODE, PREFILL
from tests.polling import until
from tests.redis_server import free_port, redis_server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "REFRESH_S", 0.02)
    monkeypatch.setattr(fleet_module, "GRACE_HEARTBEATS", 0.3)


async def test_a_worker_that_dies_ends_its_requests_and_no_others(redis: Any) -> None:
    other = Assignment(worker="agg@gpu9", incarnation="x")
    dying, living = agg(redis, silence), agg(redis, silence, other)
    async with serving(redis, dying, living) as api:
        answers = [asyncio.create_task(answer(api, job(f"r{n}"))) for n in range(8)]
        await until(lambda: len(dying.taken) + len(living.taken) == 8, "the tasks")
        await dying.die()
        await until(lambda: sum(one.done() for one in answers) == 4, "the end of half of them")
        errors = [one.exception() for one in answers if one.done()]
        assert all(isinstance(error, RemoteFailure) and error.code == "worker_lost" for error in errors)
        assert all(isinstance(error, RemoteFailure) and error.failure().retry_after_s for error in errors)
        for task in living.taken:
            living.say(task, 0, finish_reason="stop")
        rest = await asyncio.gather(*answers, return_exceptions=True)
        assert sorted(map(str, rest)).count("[0]") == 4
        await api.clean(AGG, other)


@pytest.mark.parametrize("spoken", [False, True])
async def test_a_prefill_worker_that_dies_matters_until_the_decode_worker_speaks(redis: Any, spoken: bool) -> None:
    prefill, decode = split(redis, decode=silence)
    async with serving(redis, prefill, decode) as api:
        stream = api.pipeline.stream(job())
        first = asyncio.create_task(anext(stream))
        await until(lambda: decode.taken, "the decode task")
        if spoken:
            decode.say(decode.taken[0], 0)
            await first
        await prefill.die()
        if not spoken:
            with pytest.raises(RemoteFailure, match="prefill@gpu0"):
                await asyncio.wait_for(first, 5)
        else:
            await until(lambda: len(api.fleet.now.workers) == 1, "the loss")
            await asyncio.sleep(0.5)
            decode.say(decode.taken[0], 1, finish_reason="stop")
            assert [delta.seq for delta in await asyncio.wait_for(anext(stream), 5)] == [1]
        await stream.aclose()
        await api.clean(PREFILL, DECODE)


async def test_a_request_whose_worker_dies_unheard_goes_to_another(redis: Any) -> None:
    async def first_dies(one: FakeWorker, task: DecodeTask) -> None:
        if not dead:
            dead.append(one)
            await one.die()
        else:
            await count(one, task)

    dead: list[FakeWorker] = []
    other = Assignment(worker="agg@gpu9", incarnation="x")
    one, two = agg(redis, first_dies), agg(redis, first_dies, other)
    async with serving(redis, one, two, migration_limit=1) as api:
        assert await answer(api, job(tokens=3)) == [0, 1, 2]
        (living,) = {one, two} - {*dead}
        assert [task.request_id for task in living.taken] == ["r~"]
        await api.clean(AGG, other)
        assert await cancellation.is_cancelled(redis, "r") and not await cancellation.is_cancelled(redis, "r~")


async def test_a_worker_that_says_so_itself_is_not_asked_again(redis: Any) -> None:
    """Its engine died, or it is shutting down: it is still registered, idle, and has the prompt's blocks."""

    async def give_up(one: FakeWorker, task: DecodeTask) -> None:
        if one is first[0]:
            lost = WorkerLost("the worker's engine died").failure()
            one.tokens.put(task.api, Delta(request=task.request_id, seq=1 << 31, error=lost))
        else:
            await count(one, task)

    first: list[FakeWorker] = []

    async def note(one: FakeWorker, task: DecodeTask) -> None:
        first.append(one)
        await give_up(one, task)

    workers = [agg(redis, note, Assignment(worker=f"agg@gpu{at}", incarnation="x")) for at in range(2)]
    async with serving(redis, *workers, migration_limit=1) as api:
        for number in range(10):
            first.clear()
            asked = job(f"r{number}", tokens=2, prompt=Prompt(token_ids=list(range(400))))
            assert await answer(api, asked) == [0, 1]
            assert len(first) == 2 and first[0] is not first[1]
        await api.clean(*(one.assignment for one in workers))


async def test_it_does_not_go_on_for_ever_or_after_the_first_token(redis: Any) -> None:
    async def die(one: FakeWorker, task: DecodeTask) -> None:
        if task.params["max_tokens"] == 2:
            one.say(task, 0)
            await asyncio.sleep(0.1)
        await one.die()

    workers = [agg(redis, die, Assignment(worker=f"agg@gpu{at}", incarnation="x")) for at in range(4)]
    async with serving(redis, *workers, migration_limit=1) as api:
        assert (await failure(api, job(tokens=1))).code == "worker_lost"
        assert sum(len(one.taken) for one in workers) == 2
        assert (await failure(api, job("s", tokens=2))).code == "worker_lost"
        assert sum(len(one.taken) for one in workers) == 3
        await api.clean(*(one.assignment for one in workers))


async def test_a_decode_worker_that_dies_before_it_speaks(redis: Any) -> None:
    """The API did not choose it, and was not told who did."""
    prefill, decode = split(redis, decode=silence)
    async with serving(redis, prefill, decode) as api:
        asked = asyncio.create_task(failure(api, job()))
        await until(lambda: decode.taken, "the decode task")
        await decode.die()
        raised = await asyncio.wait_for(asked, 5)
        assert raised.code == "worker_lost" and DECODE.worker in raised.failure().message
        await api.clean(PREFILL, DECODE)


async def test_a_worker_that_is_lost_while_it_is_chosen(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss was told before the request's stream was there to hear of it."""
    one = agg(redis, silence)
    async with serving(redis, one) as api:
        choose = api.router.plan

        async def slow(*asked: Any) -> Any:
            plan = await choose(*asked)
            await one.die()
            await until(lambda: api.fleet.is_lost(AGG), "the loss")
            return plan

        monkeypatch.setattr(api.router, "plan", slow)
        assert (await failure(api, job())).code == "worker_lost"
        await api.clean(AGG)


async def test_no_worker_is_said_at_once_and_leaves_nothing(redis: Any) -> None:
    async with serving(redis) as api:
        with pytest.raises(NoWorker, match="decode, prefill"):
            await answer(api, job())
        await api.clean()
    assert await redis.keys("trivet:load:*") == []


async def test_a_broker_that_is_away_costs_the_request_and_no_place(redis: Any) -> None:
    broker = connect(f"redis://127.0.0.1:{free_port()}/0", 0.3, name="broker")
    one = agg(redis)
    async with serving(redis, one, broker=broker) as api:
        with pytest.raises(BrokerUnavailable):
            await answer(api, job())
        await api.clean(AGG)
        assert one.taken == []
    await broker.aclose()


async def test_what_a_hung_redis_took_in_does_not_run_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task lies in the server's socket while the client gives up; the clean-up must outlast the hang."""
    with redis_server() as server:
        redis, theirs = connect(server.url, 0.3, name="api"), connect(server.url, 10.0, name="worker")
        one = agg(theirs)
        async with serving(redis, one) as api:
            assert await answer(api, job("before")) == list(range(5))
            decision = await api.router.plan(api.fleet.now, Ask("r", time.time() + 30, API))

            async def planned(*_: Any) -> Any:
                return decision

            monkeypatch.setattr(api.router, "plan", planned)
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(BrokerUnavailable):
                    await answer(api, job("r"))
                await asyncio.sleep(0.5)  # longer than the clean-up's first try
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            await api.pipeline.settle(20)
            assert await cancellation.is_cancelled(redis, "r")
            assert not await redis.exists(keys.load(AGG.worker, AGG.incarnation))
        await redis.aclose()
        await theirs.aclose()


async def test_a_restart_of_redis_in_the_middle_of_a_stream() -> None:
    with redis_server() as server:
        redis, theirs = (connect(server.url, 2.0, name="test") for _ in range(2))
        go_on = asyncio.Event()

        async def slow(one: FakeWorker, task: DecodeTask) -> None:
            for seq in range(20):
                if seq == 10:
                    await go_on.wait()
                one.say(task, seq, finish_reason="stop" if seq == 19 else None)
                await asyncio.sleep(0.01)

        one = agg(theirs, slow)
        async with serving(redis, one) as api:
            stream = api.pipeline.stream(job())
            got: list[int] = []
            while len(got) < 10:
                got += [delta.seq for delta in await asyncio.wait_for(anext(stream), 5)]
            server.restart()
            go_on.set()
            async with asyncio.timeout(20):
                async for deltas in stream:
                    got += [delta.seq for delta in deltas]
            assert got == list(range(20))
        await redis.aclose()
        await theirs.aclose()
