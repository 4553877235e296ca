"""workers.loading: what a worker ends up with, or refuses, around an engine that only says what it can do."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.registry import Registry
from app.roles import Does
from app.sender import TaskSender
from app.settings import Settings
from app.settings_sections import TensorSettings
from tests.messages import AGG
from workers.preflight import MisconfiguredWorker


@pytest.fixture
def loader(vllm: Any, redis: Any, tmp_path: Path) -> Any:
    from workers.loading import Loader

    settings = Settings(model="m", enable_multimodal=True, tensors=TensorSettings(directory=str(tmp_path)))
    return Loader(settings, AGG, Registry(redis, 20.0), redis, TaskSender(redis))


def engine(monkeypatch: pytest.MonkeyPatch, *, embeds: bool) -> None:
    from workers import loading

    async def answer() -> bool:
        return embeds

    monkeypatch.setattr(loading, "Engine", lambda *_: SimpleNamespace(renderer=None, embeds=answer))


@pytest.mark.parametrize("does", list(Does))
async def test_a_worker_of_text_sees_its_fleet(loader: Any, does: Does, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch, embeds=does is Does.EMBED)
    loaded = await loader.load(does, None, None)
    assert loaded.items is None and loaded.fleet.reachable
    [watching] = [asyncio.create_task(one) for one in loaded.work]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_of_pooling_models_one_that_does_not_embed_is_refused(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(monkeypatch, embeds=False)
    with pytest.raises(MisconfiguredWorker, match="classifies or ranks"):
        await loader.load(Does.EMBED, None, None)


async def test_an_engine_that_cannot_load_leaves_no_memory(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers import loading
    from workers.items.memory import EmbeddingMemory

    def fail(*_: Any) -> None:
        raise RuntimeError("no room on the device")

    monkeypatch.setattr(loading, "Engine", fail)
    memory = EmbeddingMemory(loader.settings, "w")
    assert memory.folder.path.exists()
    with pytest.raises(RuntimeError, match="no room"):
        await loader.load(Does.GENERATE, memory, None)
    assert not memory.folder.path.exists()
