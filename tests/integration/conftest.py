"""What tests of items share, a cluster whose workers handle them, and what those of adapters do."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.adapter_registry import AdapterRegistry
from tests.integration.adapter_cluster import MODEL, SQL, Sources


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


@pytest.fixture
def sources() -> Sources:
    """One adapter that can be fetched."""
    made = Sources()
    made.versions = {SQL: "v1"}
    return made


@pytest.fixture
def registry(redis: Any) -> AdapterRegistry:
    return AdapterRegistry(redis, MODEL)
