"""app.celery: the application that workers, Flower and the CLI import."""

import subprocess
import sys
from pathlib import Path

import pytest
from celery.app.defaults import DEFAULTS
from kombu.transport.redis import Channel

from app import celery
from app.roles import ALL, Role

ROOT = Path(celery.__file__).parents[1]


@pytest.mark.parametrize("module", ["app.celery", "workers.tasks", "app.settings", "app.streaming", "api.pipeline"])
def test_importing_it_does_not_import_an_engine(module: str) -> None:
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'vllm', 'transformers'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_workers_own_queues_come_first() -> None:
    names = [queue.name for queue in celery.queues("agg@gpu0", frozenset({Role.DECODE, Role.PREFILL}))]
    assert names == ["decode.agg@gpu0", "prefill.agg@gpu0", "decode", "prefill"]
    assert [queue.routing_key for queue in celery.queues("w", ALL)] == [q.name for q in celery.queues("w", ALL)]


def test_settings_are_celerys_own() -> None:
    """Celery drops names that it does not know without a word."""
    assert set(celery.configuration("redis://")) - set(DEFAULTS) == set()


def test_the_transport_knows_its_options() -> None:
    options = celery.configuration("redis://")["broker_transport_options"]
    assert [name for name in options if name != "client_name" and not hasattr(Channel, name)] == []
    # A priority queue's name is the queue's, so that a plain LPUSH reaches it.
    assert options["priority_steps"][0] == 0


def test_messages_are_json_alone() -> None:
    assert celery.app.conf.accept_content == ["json"]
    assert celery.app.conf.task_serializer == "json"
    assert celery.app.conf.result_backend is None
