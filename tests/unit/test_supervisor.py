"""workers.supervisor: a worker fails with the first of what it needs that ends, and not with its own end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from workers.supervisor import Supervisor


async def forever() -> None:
    await asyncio.Event().wait()


async def end(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


@pytest.mark.parametrize("fault", [None, RuntimeError("lost")], ids=["it returns", "it raises"])
async def test_no_work_may_end(fault: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor("w")
    supervisor.start([forever(), end(fault)])
    await asyncio.wait_for(supervisor.failed.wait(), 5)
    assert f"a background task of worker w ended: {fault!r}" in caplog.text
    supervisor.stop()


async def test_nor_may_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor("w")
    engine: Any = SimpleNamespace(dead=False)
    supervisor.start([supervisor.watch(engine)])
    await asyncio.sleep(0)
    assert not supervisor.failed.is_set()
    engine.dead = True
    await asyncio.wait_for(supervisor.failed.wait(), 5)
    await asyncio.gather(*supervisor._tasks)
    assert [one.getMessage() for one in caplog.records] == [
        "the engine of worker w died; the worker ends so that it can be started anew"
    ]


async def test_what_is_stopped_has_not_failed() -> None:
    supervisor = Supervisor("w")
    supervisor.start([forever()])
    await asyncio.sleep(0)
    supervisor.stop()
    await asyncio.gather(*supervisor._tasks, return_exceptions=True)
    assert supervisor._tasks[0].cancelled() and not supervisor.failed.is_set()
