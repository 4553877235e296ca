"""workers.tasks: what surrounds every stage."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from app.errors.adapters import AdapterMissing
from app.messages.deltas import Delta
from app.messages.tasks import DecodeTask
from tests.messages import decode_task
from workers import tasks
from workers.jobs import Jobs


class Cache:
    """A Redis that knows one tombstone, is away, or does not answer."""

    def __init__(self, answer: int | Exception | None) -> None:
        self._answer = answer

    async def exists(self, _: str) -> int:
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        assert isinstance(self._answer, int)
        return self._answer


class Case:
    """A task around a stage that only notes that it ran."""

    def __init__(self, answer: int | Exception | None) -> None:
        self.said: list[Delta] = []
        self.ran: list[str] = []
        tokens = SimpleNamespace(put=lambda _api, delta: self.said.append(delta))
        self.host: Any = SimpleNamespace(jobs=Jobs(), cache=Cache(answer), tokens=tokens, unplace=self._note_place)
        self.host.using = self._using

    async def run(self, task: DecodeTask) -> None:
        await tasks._run(self.host, task, self._note("stage"), self._note("refuse"))

    @contextmanager
    def _using(self, task: DecodeTask) -> Iterator[None]:
        if task.adapter:
            raise AdapterMissing("not here")
        yield

    async def _note_place(self, task: DecodeTask) -> None:
        self.ran.append(f"unplace {task.request_id}")

    def _note(self, what: str) -> Any:
        async def noted(_host: Any, _task: Any) -> None:
            self.ran.append(what)

        return noted

    @property
    def codes(self) -> list[str]:
        return [delta.error.code for delta in self.said if delta.error is not None]


async def test_a_request_that_goes_on_runs_its_stage() -> None:
    case = Case(0)
    await case.run(decode_task("r"))
    assert (case.ran, case.codes, len(case.host.jobs)) == (["stage"], [], 0)


@pytest.mark.parametrize(("answer", "seconds"), [(1, 60), (0, -1)], ids=["cancelled", "past its deadline"])
async def test_a_request_that_is_over_gives_back_what_it_holds(answer: int, seconds: float) -> None:
    case = Case(answer)
    await case.run(decode_task("r", time.time() + seconds))
    assert (case.ran, case.codes) == (["refuse"], [])


async def test_a_worker_without_the_adapter_refuses_and_runs_nothing() -> None:
    case = Case(0)
    await case.run(decode_task("r", adapter="sql@1"))
    assert (case.ran, case.codes) == (["refuse"], ["adapter_missing"])


async def test_a_redis_that_is_away_is_said_to_be_and_nothing_stays_held() -> None:
    case = Case(ConnectionError("gone"))
    await case.run(decode_task("r"))
    assert (case.ran, case.codes) == (["refuse"], ["broker_unavailable"])


async def test_one_cancelled_during_the_look_at_its_tombstone_holds_nothing() -> None:
    case = Case(None)
    running = asyncio.create_task(case.run(decode_task("r")))
    await asyncio.sleep(0)
    case.host.jobs.cancel("r")
    await asyncio.wait_for(running, 5)
    assert (case.ran, case.codes, len(case.host.jobs)) == (["unplace r", "refuse"], [], 0)
