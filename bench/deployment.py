"""Deployments to compare: `trivet up`, each with a name, ports and a Redis of its own, side by side on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis

from app import keys, ports
from app.registry import WorkerRecord

MODEL = "bench"


@dataclass(frozen=True)
class Deployment:
    port: int
    redis_url: str

    def counter(self, name: str, label: str = "") -> float:
        """The sum of a Prometheus counter over all workers and label sets with `label`."""
        return sum(metric(worker, name, label) for worker in workers(self.redis_url))


def workers(redis_url: str) -> list[WorkerRecord]:
    """Registered workers, by name."""
    with redis.Redis.from_url(redis_url) as client:
        found = [client.get(keys.worker(member.decode())) for member in client.smembers(keys.WORKERS)]
    return sorted((WorkerRecord.model_validate_json(one) for one in found if one is not None), key=lambda one: one.id)


def metric(worker: WorkerRecord, name: str, label: str = "") -> float:
    """The sum of a worker's Prometheus metric over all label sets with `label`."""
    with urllib.request.urlopen(worker.metrics, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name and label in line)


@contextmanager
def running(name: str, topology: str, model: str, flags: list[str]) -> Iterator[Deployment]:
    """Start it and wait until a request has succeeded; stop it in the end."""
    port, redis_port = ports.reserve(), ports.reserve()
    redis_url = f"redis://127.0.0.1:{redis_port}/0"
    options = {
        "--name": f"bench-{name}",
        "--topology": topology,
        "--model": model,
        "--served-model-name": MODEL,
        "--api-port": str(port),
        "--redis-url": redis_url,
        "--timeout": "900",
    }
    given = [word for pair in options.items() for word in pair]
    _trivet("up", "--detach", "--enable-multimodal", "--no-flower", *given, *flags)
    try:
        yield Deployment(port, redis_url)
    finally:
        _trivet("down", "--name", f"bench-{name}")


def _trivet(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=1000,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"trivet {arguments[0]} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
