import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import pytest

from app.errors.tensors import TensorError
from app.messages.tensors import Descriptor
from app.tensors import nixl_progress
from app.tensors.nixl_agent import NixlAgent
from app.tensors.nixl_reads import Region
from tests.polling import until


async def test_a_nixl_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise ImportError("no NIXL backend found")

    monkeypatch.setattr(nixl_progress, "apply", fail)
    agent = NixlAgent("127.0.0.1", 100, 10.0)
    early = agent.call(lambda _: None)
    with pytest.raises(TensorError, match="NIXL cannot start: no NIXL backend found"):
        await agent.start()
    for call in (early, agent.call(lambda _: None)):
        with pytest.raises(TensorError, match="closed"):
            await call
    await agent.close()


async def test_an_agent_that_was_never_started() -> None:
    agent = NixlAgent("127.0.0.1", 100, 10.0)
    await agent.close()
    otherwise: list[Any] = []
    agent.submit(lambda _: None, lambda: otherwise.append(1))
    assert otherwise == [1]


def test_names_differ() -> None:
    assert len({NixlAgent("127.0.0.1", 100, 10.0).name for _ in range(10)}) == 10


class FakeReads:
    """In place of what needs NIXL. `broken` is raised at the next look."""

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.pending: list[Future[None]] = []

    next_look_s = 0.001

    def begin(self, source: Descriptor, length: int, into: Any, done: Future[None]) -> None:
        self.pending.append(done)

    def poll(self) -> None:
        if self.broken is not None:
            raise self.broken

    def close(self, error: TensorError) -> None:
        for done in self.pending:
            done.set_exception(error)


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[NixlAgent, FakeReads]]:
    reads = FakeReads()
    monkeypatch.setattr(NixlAgent, "_open", lambda _: reads)
    made = NixlAgent("127.0.0.1", 100, 0.2)
    await made.start()
    yield made, reads
    await made.close()


async def test_a_nixl_that_hangs_holds_nobody_up_for_longer(agent: tuple[NixlAgent, FakeReads]) -> None:
    made, _ = agent
    go, ran = threading.Event(), threading.Event()
    hung = asyncio.create_task(made.call(lambda _: go.wait(10)))
    for call in (made.call(lambda _: ran.set()), hung):
        with pytest.raises(TensorError, match=r"did not answer within 0\.2 s \(tensors\.timeout_s\)"):
            await asyncio.wait_for(call, 5)
    assert not ran.is_set()
    go.set()
    # What was given up happens all the same, in its order.
    assert await made.call(lambda _: ran.is_set())


async def test_when_its_thread_fails_all_hear_of_it(
    agent: tuple[NixlAgent, FakeReads], caplog: pytest.LogCaptureFixture
) -> None:
    made, reads = agent
    source: Any = None
    reading = asyncio.create_task(made.read(source, 1, Region(0, 1, None), 60.0))
    await until(lambda: reads.pending, "the read")
    begun, go = threading.Event(), threading.Event()
    working = asyncio.create_task(made.call(lambda _: (begun.set(), go.wait(10))))
    await until(begun.is_set, "the job")
    queued = asyncio.create_task(made.call(lambda _: None))
    await asyncio.sleep(0)
    reads.broken = RuntimeError("a bug")
    go.set()
    await working
    for waiting in (queued, reading, made.call(lambda _: None)):
        with pytest.raises(TensorError, match="NIXL failed in this process"):
            await asyncio.wait_for(waiting, 5)
    assert "NIXL's thread failed" in caplog.text and "a bug" in caplog.text
    await made.close()


async def test_a_job_that_fails_the_thread_is_refused(agent: tuple[NixlAgent, FakeReads]) -> None:
    made, _ = agent
    otherwise = threading.Event()

    def fail(_: Any) -> None:
        raise RuntimeError("a bug")

    made.submit(fail, otherwise.set)
    await until(otherwise.is_set, "the refusal")
    with pytest.raises(TensorError):
        await made.call(lambda _: None)
