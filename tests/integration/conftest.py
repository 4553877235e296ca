"""What the tests of items share: a cluster whose workers handle them."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
async def cluster(
    vllm: Any, redis_url: str, shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """No workers yet: see tests.integration.item_cluster."""
    from tests.integration import item_cluster
    from workers import tasks

    monkeypatch.setattr(tasks, "current", item_cluster.taker.get)
    async with item_cluster.cluster(shared_memory, tmp_path, redis_url) as made:
        yield made
