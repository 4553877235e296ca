"""The API's own process with a Redis, and a worker that answers at once: what the API costs, and what it bears."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from app import ports
from bench import processes
from bench.deployment import MODEL


@dataclass(frozen=True)
class Alone:
    port: int
    api: psutil.Process


@contextmanager
def running(model: str, settings: Mapping[str, str] | None = None, step_ms: float = 0.0) -> Iterator[Alone]:
    """Start it and wait until a request would be served. `settings` are environment variables.

    The worker answers a token every `step_ms`, or all at once.
    """
    redis_port, port = ports.reserve(), ports.reserve()
    environment = {
        "TRIVET_REDIS__BROKER_URL": f"redis://127.0.0.1:{redis_port}/0",
        "TRIVET_MODEL": model,
        "TRIVET_SERVED_MODEL_NAME": MODEL,
        "TRIVET_ENABLE_MULTIMODAL": "true",
        "HF_HUB_OFFLINE": "1",
    }
    with processes.running({**environment, **(settings or {})}) as started:
        started.redis(redis_port)
        started.python("worker", f"-m bench.echo_worker --step-ms {step_ms}")
        # A connection that the server closes while the next request is sent on it is no subject here.
        api = started.python(
            "api",
            f"-m uvicorn api.main:app --http api.http_protocol:BoundedHttp --port {port} --no-access-log "
            "--timeout-keep-alive 600",
        )
        started.wait_ready(f"http://127.0.0.1:{port}/health/ready")
        yield Alone(port, api)
