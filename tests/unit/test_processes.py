"""An API of several processes: their metrics together, and their end when one of them cannot start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from api import processes
from tests.command_lines import ROOT
from tests.redis_server import free_port

COUNT = """
import os, signal, sys
from api import metrics
metrics.REQUESTS.labels("ok").inc(int(sys.argv[1]))
metrics.IN_FLIGHT.inc(int(sys.argv[1]))
metrics.WORKERS.labels("decode").set(2)
metrics.TOKEN_GAPS.set(1)
print("there", flush=True)
sys.stdin.read()
"""
RENDER = "from api import metrics; print(metrics.render().decode())"


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": str(ROOT)}


def rendered(folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", RENDER], env=environment(folder), capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_are_those_of_all_processes(tmp_path: Path) -> None:
    counting = [
        subprocess.Popen(
            [sys.executable, "-c", COUNT, number],
            env=environment(tmp_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in ("2", "3")
    ]
    first, second = counting
    with first, second:
        for one in counting:
            assert one.stdout is not None and one.stdout.readline() == b"there\n"
        found = rendered(tmp_path)
        assert found['trivet_requests_total{outcome="ok"}'] == 5
        assert found["trivet_requests_in_flight"] == 5
        assert (found['trivet_workers{role="decode"}'], found["trivet_token_gaps"]) == (2, 2)
        second.kill()
        second.wait()
        found = rendered(tmp_path)
        assert found['trivet_requests_total{outcome="ok"}'] == 5, "what a process has counted stays"
        assert found["trivet_requests_in_flight"] == 2, "what it had in flight does not"
        first.kill()


APP = """
import os
from fastapi import FastAPI
from contextlib import asynccontextmanager
from api import processes
@asynccontextmanager
async def lifespan(app):
    if os.path.exists(broken := os.environ["BROKEN"]):
        with open(broken, "a") as file:
            file.write("tried\\n")
        processes.end_siblings()
        raise RuntimeError("it cannot start")
    yield
app = FastAPI(lifespan=lifespan)
@app.get("/pid")
def pid() -> int:
    return os.getpid()
"""


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "served_here.py").write_text(APP)
    return tmp_path


def uvicorn(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "uvicorn", "served_here:app", "--port", str(port), "--workers", "2"]
    more = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "BROKEN": str(folder / "broken")}
    return subprocess.Popen([*command, "--log-level", "error"], env=os.environ | more, stderr=subprocess.DEVNULL)


def pids(port: int) -> set[int]:
    """Of those that answer, each over a connection of its own."""
    found = set()
    for _ in range(20):
        try:
            found.add(httpx.get(f"http://127.0.0.1:{port}/pid", timeout=5).json())
        except httpx.TransportError:
            time.sleep(0.2)
    return found


def test_when_none_can_start_they_end(served: Path) -> None:
    (served / "broken").touch()
    with uvicorn(served, free_port()) as process:
        try:
            assert process.wait(60) is not None
        finally:
            process.kill()


def test_one_that_cannot_start_again_ends_alone(served: Path) -> None:
    port = free_port()
    with uvicorn(served, port) as process:
        try:
            until = time.monotonic() + 60
            while len(before := pids(port)) < 2:
                assert time.monotonic() < until, before
            time.sleep(processes.TOGETHER_S)  # later than those that are started together
            (served / "broken").touch()
            os.kill(min(before), signal.SIGKILL)
            while not (served / "broken").read_text():
                assert time.monotonic() < until + 60
                time.sleep(0.1)
            assert process.poll() is None and pids(port) == {max(before)}
        finally:
            process.terminate()
            process.wait(30)
