"""An API of several processes on one port, beside the one of a running topology."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from app import keys, ports
from tests.e2e.stack import MODEL, Stack

ROOT = Path(__file__).parents[2]
PROCESSES = 2
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}
#: Longer than a look at metrics takes.
CHOICES = 32
LONG = {**ASK, "temperature": 1.0, "max_tokens": 1800, "ignore_eos": True, "stream": True, "n": CHOICES}


@contextmanager
def served(stack: Stack, model: Path, folder: Path) -> Iterator[str]:
    port = ports.reserve()
    (folder / "metrics").mkdir()
    environment = os.environ | {
        "TRIVET_MODEL": str(model),
        "TRIVET_SERVED_MODEL_NAME": MODEL,
        "TRIVET_REDIS__BROKER_URL": stack.redis_url,
        "TRIVET_ENGINE__ARGS": "--max-model-len 2048 --dtype float32",
        "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"),
    }
    command = [sys.executable, "-m", "uvicorn", "api.main:app", "--http", "api.http_protocol:BoundedHttp"]
    command += ["--port", str(port), "--workers", str(PROCESSES), "--timeout-worker-healthcheck", "120"]
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(60) in (0, -15), (folder / "api.log").read_text()[-2000:]


def until(found: Callable[[], object], what: str, limit_s: float = 240.0) -> None:
    end = time.monotonic() + limit_s
    while not found():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def apis(stack: Stack) -> set[str]:
    with stack.redis as redis:
        return {json.loads(redis.get(key) or "{}").get("id", "") for key in redis.keys(keys.api("*"))}


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live", timeout=30).is_success
    except httpx.ConnectError:
        return False


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_requests_spread_and_end_with_their_clients(agg: Stack, model: Path, tmp_path: Path) -> None:
    before = apis(agg)
    with served(agg, model, tmp_path) as url:
        until(lambda: len(apis(agg) - before) == PROCESSES, "an id for each process")
        own = apis(agg) - before
        until(lambda: answers(url), "a process that takes connections", 60.0)

        def ask(_: int) -> str:
            answer = httpx.post(f"{url}/v1/chat/completions", json={**ASK, "max_tokens": 8}, timeout=120)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["message"]["content"])

        told: list[str] = []
        with agg.redis as redis, ThreadPoolExecutor(8) as pool:

            def have_all_served() -> bool:
                """Which connection is whose is up to the kernel, and a process has its id before it takes any."""
                told.extend(pool.map(ask, range(40)))
                return all(redis.exists(keys.replay(api)) for api in own)

            until(have_all_served, "a request for each process", 60.0)
            assert len(set(told)) == 1, "each process reads its own tokens"
            assert metric(url, 'trivet_requests_total{outcome="ok"}') == len(told)
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=120) as stream:
                lines = stream.iter_lines()  # a name for it: httpx hangs up when it is collected
                assert next(lines).startswith("data: ")
                assert metric(url, "trivet_requests_in_flight") == 1
                (load,) = redis.keys(keys.load("*", "*"))
                until(lambda: redis.hget(load, "requests") == str(CHOICES).encode(), "all choices", 10.0)
            until(lambda: not redis.exists(load), "the request's end", 10.0)
        until(lambda: metric(url, "trivet_requests_in_flight") == 0, "the end of what is in flight", 10.0)
        assert metric(url, 'trivet_requests_total{outcome="cancelled"}') == 1
