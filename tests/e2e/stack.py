"""A running topology, as the tests see it: started and stopped by the product's own command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import redis
from openai import OpenAI

from app import ports
from app.launch.state import State, StateDirectory
from app.registry import WorkerRecord
from bench import deployment

MODEL = "tiny"
ENGINE = (
    "--dtype float32 --max-model-len 2048 --max-num-seqs 64 --max-num-batched-tokens 2048 --enforce-eager "
    "--skip-mm-profiling --block-size 32 --kv-cache-memory-bytes 268435456 --seed 0 --limit-mm-per-prompt"
)
#: Engines that take adapters: what the model itself answers must be the same with them.
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--max-cpu-loras", "4")
TOOL_PARSER = "hermes"
#: Most media of each kind in a prompt.
LIMITS = {"image": 4, "video": 1}
START_S = 400.0
#: Small, so that embeddings are evicted now and then.
CACHE_GB = 0.05


_clients: list[OpenAI] = []


def close_clients() -> None:
    """All that stacks have given. One that the garbage collector finds, in the traceback of an error that was expected,
    would fail whichever test runs then."""
    while _clients:
        _clients.pop().close()


@dataclass
class Stack:
    """One topology. `name` is that of its `trivet up`."""

    name: str
    topology: str
    base_url: str
    flower_url: str
    redis_url: str
    model: str = MODEL

    @property
    def client(self) -> OpenAI:
        """The real client, without retries of its own: a failure must show. Open until the test has ended."""
        made = OpenAI(base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=120)
        _clients.append(made)
        return made

    @property
    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.redis_url)

    @property
    def state(self) -> State:
        state = StateDirectory(self.name).read()
        assert state is not None
        return state

    def all_workers(self) -> list[WorkerRecord]:
        """Registered workers, by name."""
        return deployment.workers(self.redis_url)

    def workers(self) -> dict[str, WorkerRecord]:
        """One registered worker of each kind, by the name before the @."""
        return {record.id.partition("@")[0]: record for record in self.all_workers()}

    def counter(self, kind: str, name: str, label: str = "") -> float:
        """A Prometheus metric of all workers of a kind, summed over all label sets with `label`."""
        return sum(
            deployment.metric(one, name, label) for one in self.all_workers() if one.id.partition("@")[0] == kind
        )

    def post(self, body: object = None, **more: object) -> httpx.Response:
        content: dict[str, object] = {"json": body} if body is not None else {}
        return httpx.post(f"{self.base_url}/v1/chat/completions", timeout=120, **content, **more)  # type: ignore[arg-type]


def trivet(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ,
    )


@contextmanager
def up(name: str, topology: str, model: Path, *flags: str, limits: Mapping[str, int] = LIMITS) -> Iterator[Stack]:
    """`trivet up --detach`, and `trivet down` in the end."""
    api, flower, redis_port = ports.reserve(), ports.reserve(), ports.reserve()
    redis_url = f"redis://127.0.0.1:{redis_port}/0"
    command = [
        "up",
        "--detach",
        "--name",
        name,
        "--topology",
        topology,
        "--model",
        str(model),
        "--served-model-name",
        MODEL,
    ]
    command += ["--enable-multimodal", "--api-port", str(api), "--flower-port", str(flower), "--redis-url", redis_url]
    # The model's template does not say how it would write a call, and a random model is only made to.
    command += ["--tool-call-parser", TOOL_PARSER]
    command += [
        "--multimodal-embedding-cache-capacity-gb",
        str(CACHE_GB),
        "--timeout",
        str(START_S),
        *shlex.split(ENGINE),
        json.dumps(limits),
        *flags,
    ]
    started = trivet(*command, timeout=START_S + 60)
    try:
        assert started.returncode == 0, started.stdout[-3000:] + started.stderr[-3000:]
        yield Stack(name, topology, f"http://127.0.0.1:{api}", f"http://127.0.0.1:{flower}", redis_url)
    finally:
        stopped = trivet("down", "--name", name, timeout=120)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
