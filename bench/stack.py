"""The processes of a benchmark: Redis, one aggregated worker, one API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from app import ports
from bench import processes

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


@contextmanager
def running(model: str, flags: str, api_processes: int = 1) -> Iterator[Stack]:
    """Start everything and wait until a request would be served."""
    redis_port, api_port = ports.reserve(), ports.reserve()
    redis_url = f"redis://127.0.0.1:{redis_port}/0"
    environment = {
        "TRIVET_REDIS__BROKER_URL": redis_url,
        "TRIVET_MODEL": model,
        "TRIVET_SERVED_MODEL_NAME": "bench",
        "TRIVET_ENGINE__ARGS": flags,
        "TRIVET_API__PORT": str(api_port),
        "HF_HUB_OFFLINE": "1",
        # Threads beyond the engine's own would take the cores that API, Redis and client run on.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    with processes.running(environment) as started:
        started.redis(redis_port)
        worker = started.python(
            "worker",
            "-m celery -A app.celery worker -n agg@bench --include bench.inprocess --without-gossip --without-mingle",
        )
        api = started.python(
            "api", f"-m uvicorn api.main:app --port {api_port} --no-access-log --workers {api_processes}"
        )
        started.wait_ready(f"http://127.0.0.1:{api_port}/health/ready")
        yield Stack(redis_url, api_port, api, worker)
