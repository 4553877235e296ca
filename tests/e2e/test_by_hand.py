"""Parts started by hand, and what they say when they can't start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from app import ports
from app.settings import variable
from tests.e2e.prompts import image, user
from tests.e2e.second_api import second_api
from tests.e2e.stack import Stack
from tests.redis_server import redis_server

ROOT = Path(__file__).parents[2]


def run(*command: str, limit_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def test_encode_role_needs_consent(home: Path, model: Path) -> None:
    ended = run(
        "celery", "-A", "app.celery", "worker", "-n", "encode@test", "--roles", "encode,prefill", "--model", str(model)
    )
    assert ended.returncode != 0
    assert "--enable-multimodal" in ended.stdout + ended.stderr


@pytest.mark.parametrize("part", ["worker", "api"])
def test_no_redis(home: Path, model: Path, part: str) -> None:
    address = f"127.0.0.1:{ports.reserve()}"
    command = {
        "worker": ("celery", "-A", "app.celery", "worker", "-n", "agg@test"),
        "api": ("uvicorn", "api.main:app", "--port", str(ports.reserve())),
    }
    started = time.monotonic()
    ended = run(
        *command[part],
        TRIVET_REDIS__BROKER_URL=f"redis://{address}/0",
        TRIVET_REDIS__TIMEOUT_S="2",
        TRIVET_MODEL=str(model),
    )
    assert ended.returncode != 0
    assert time.monotonic() - started < 30
    assert address in ended.stderr and "TRIVET_REDIS__WAIT" in ended.stderr


@pytest.mark.parametrize("part", ["worker", "api"])
def test_broker_that_may_evict_queues(home: Path, model: Path, part: str) -> None:
    command = {
        "worker": ("celery", "-A", "app.celery", "worker", "-n", "agg@test"),
        "api": ("uvicorn", "api.main:app", "--port", str(ports.reserve())),
    }
    with redis_server(None, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        ended = run(*command[part], TRIVET_REDIS__BROKER_URL=server.url, TRIVET_MODEL=str(model))
    assert ended.returncode != 0
    assert "redis-cli CONFIG SET maxmemory-policy" in ended.stdout + ended.stderr


@pytest.mark.parametrize("roles", ["encode", "prefill,decode"])
def test_stages_apart_need_an_embedding_cache(home: Path, roles: str) -> None:
    ended = run(
        *("celery", "-A", "app.celery", "worker", "-n", "any@test", "--roles", roles, "--enable-multimodal"),
        *("--multimodal-embedding-cache-capacity-gb", "0"),
    )
    assert ended.returncode != 0
    assert "TRIVET_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("part", "setting"), [("worker", "multimodal_embedding_cache_capacity_gb"), ("api", "tensors.media_gb")]
)
def test_shared_memory_that_is_not_there(home: Path, model: Path, part: str, setting: str) -> None:
    command = {
        "worker": ("celery", "-A", "app.celery", "worker", "-n", "encode@test", "--roles", "encode"),
        "api": ("uvicorn", "api.main:app", "--port", str(ports.reserve())),
    }
    with redis_server(None) as server:
        ended = run(
            *command[part],
            TRIVET_REDIS__BROKER_URL=server.url,
            TRIVET_MODEL=str(model),
            TRIVET_ENABLE_MULTIMODAL="true",
            **{variable(setting): "1000000"},
        )
    assert ended.returncode != 0
    assert f"{setting} wants 1e+06 GB" in ended.stdout + ended.stderr


def test_wrong_setting_is_named(home: Path) -> None:
    ended = run("celery", "-A", "app.celery", "worker", "-n", "agg@test", TRIVET_WORKER__ROLES="encode,paint")
    assert ended.returncode != 0
    assert "worker.roles" in ended.stdout + ended.stderr and "decode" in ended.stdout + ended.stderr


def test_api_without_consent_takes_no_media(agg: Stack, model: Path) -> None:
    """A second API over the same workers, started without --enable-multimodal."""
    with second_api(agg.redis_url, model) as base_url:
        url = f"{base_url}/v1/chat/completions"
        refused = httpx.post(url, json={"model": "tiny", "messages": user(image(1), "?"), "max_tokens": 1}, timeout=60)
        assert refused.status_code == 400
        assert "--enable-multimodal" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "messages[0].content[0]"
        served = httpx.post(url, json={"model": "tiny", "messages": user("hi"), "max_tokens": 1}, timeout=60)
        assert served.status_code == 200
