"""workers.host and workers.bootstep: the end of a worker, whoever does not answer meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.settings import Settings
from app.settings_sections import RedisSettings, TensorSettings
from app.tensors import folder
from workers import bootstep
from workers import host as hosting
from workers.bootstep import EngineStep
from workers.host import Host
from workers.loop_thread import LoopThread


@pytest.fixture
def silent_redis() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


@pytest.fixture
async def host(silent_redis: str, tmp_path: Path) -> Host:
    """With an engine and items that note their end, and a folder of its own."""
    made = Host(
        Settings(redis=RedisSettings(broker_url=silent_redis), tensors=TensorSettings(directory=str(tmp_path))), "w", 1
    )
    parts: Any = made
    parts.ended = []
    parts.engine = SimpleNamespace(shutdown=lambda: parts.ended.append("engine"))
    parts.items = SimpleNamespace(close=lambda: asyncio.sleep(0))
    parts._memory = SimpleNamespace(folder=folder.make_folder(tmp_path, "w"))
    return made


def left(root: Path) -> list[str]:
    return [one.name for one in (root / f"trivet-{os.geteuid()}").iterdir()]


def test_the_steps_of_an_end_fit_into_its_time() -> None:
    engine_s = 1.0
    assert hosting.LAST_WORDS_S + engine_s + hosting.ITEMS_S < bootstep.STOP_S


@pytest.mark.parametrize("fault", ["the items hang", "the items fail", "the engine fails", "none"])
async def test_no_memory_is_left_whoever_does_not_answer(
    fault: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "LAST_WORDS_S", 0.2)
    monkeypatch.setattr(hosting, "ITEMS_S", 0.2)
    parts: Any = host

    async def hang() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        raise RuntimeError("no")

    def engine_fails() -> None:
        raise RuntimeError("no")

    if fault.startswith("the items"):
        parts.items.close = hang if fault.endswith("hang") else fail
    if fault == "the engine fails":
        parts.engine.shutdown = engine_fails
    began = time.monotonic()
    [outcome] = await asyncio.gather(asyncio.wait_for(host.stop(), 8), return_exceptions=True)
    assert time.monotonic() - began < 2.0
    assert isinstance(outcome, RuntimeError if fault.endswith("fail") or fault == "the engine fails" else type(None))
    assert left(tmp_path) == []
    assert parts.ended == ([] if fault == "the engine fails" else ["engine"])


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    """The loop that stages run on."""
    thread = LoopThread("engine", lambda _: None)
    thread.start()
    monkeypatch.setattr(bootstep, "engine_loop", lambda: thread.loop)
    yield thread
    thread.stop(5)


class SlowHost:
    """Never done with anything."""

    id, jobs = "w", ()

    def __init__(self, root: Path) -> None:
        self.folder = folder.make_folder(root, "w")
        self.cancelled = 0

    def cancel_all(self) -> None:
        pass

    async def drain(self) -> None:
        await self._hang()

    async def stop(self) -> None:
        await self._hang()

    def remove_memory(self) -> None:
        self.folder.remove()

    async def _hang(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("how", ["stop", "terminate"])
def test_the_step_waits_in_bounds_and_leaves_no_memory(
    how: str, loop: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit_s in {"PATIENCE_S": 0.3, "SLOW_S": 0.2, "IMPATIENT_S": 0.05, "STOP_S": 0.3}.items():
        monkeypatch.setattr(bootstep, name, limit_s)
    host: Any = SlowHost(tmp_path)
    monkeypatch.setattr(bootstep, "turn_away", lambda one: one._hang())
    step = EngineStep(None)
    step.host = host
    began = time.monotonic()
    step.close(None)
    getattr(step, how)(None)
    # The first that Redis was asked for took all patience, the next little.
    assert 0.6 < time.monotonic() - began < 1.5
    assert left(tmp_path) == [] and step.host is None
    end = time.monotonic() + 5
    while host.cancelled < 3:
        assert time.monotonic() < end
        time.sleep(0.01)


ENDING = """
import subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from app.tensors import folder
from workers import bootstep
from workers.host import Host

engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(engine.pid, flush=True)
own = folder.make_folder(Path(sys.argv[1]), "w")
(own.path / "embedding").write_bytes(b"x")
host = Host.__new__(Host)
host._memory = SimpleNamespace(folder=own)
bootstep._end_now(3, host)
"""


def test_a_worker_that_ends_at_once_leaves_no_memory(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 3, run.stderr
    assert left(tmp_path) == []
    assert not Path(f"/proc/{run.stdout.strip()}").exists()
