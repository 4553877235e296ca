"""Another API process over a running topology's Redis, with settings of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app import ports
from tests.e2e.stack import MODEL

ROOT = Path(__file__).parents[2]
START_S = 120.0


@contextmanager
def second_api(redis_url: str, model: Path, ready: str = "/health/ready", **settings: str) -> Iterator[str]:
    """Its base URL, once it answers 200 for the path `ready`. `settings` are environment variables."""
    port = ports.reserve()
    environment = {
        "TRIVET_REDIS__BROKER_URL": redis_url,
        "TRIVET_MODEL": str(model),
        "TRIVET_SERVED_MODEL_NAME": MODEL,
        "TRIVET_ENGINE__ARGS": "--max-model-len 2048 --dtype float32",
    }
    command = [sys.executable, "-m", "uvicorn", "api.main:app", "--port", str(port)]
    api = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment | settings)
    try:
        _wait(f"http://127.0.0.1:{port}{ready}", api)
        yield f"http://127.0.0.1:{port}"
    finally:
        api.terminate()
        assert api.wait(20) is not None


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, "the API ended"
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    pytest.fail(f"the API was not ready within {START_S:.0f} s")
