"""api.services: what a start that fails on the way, or an end on which somebody does not answer, leaves behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from app.settings_sections import RedisSettings, TensorSettings


@pytest.fixture
def services(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with nothing in it that needs a model."""
    from api import services

    monkeypatch.setattr(services.fingerprint, "of_settings", lambda _: "f")
    return services


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    return Settings(
        model="m",
        enable_multimodal=True,
        redis=RedisSettings(broker_url=redis_url),
        tensors=TensorSettings(directory=str(tmp_path), media_gb=0.001),
    )


def left(root: Path) -> list[str]:
    return [one.name for one in (root / f"trivet-{os.geteuid()}").iterdir()]


async def test_a_start_that_fails_leaves_nothing(
    services: Any, settings: Settings, redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        assert len(left(tmp_path)) == 1
        raise ValueError("no such model")

    monkeypatch.setattr(services, "Serving", fail)
    with pytest.raises(ValueError, match="no such model"):
        async with services.running(settings):
            pytest.fail("it runs")
    assert left(tmp_path) == []
    assert [one["name"] for one in await redis.client_list() if one["name"].startswith("trivet-")] == []


async def test_an_end_that_fails_leaves_no_memory(
    services: Any, settings: Settings, redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise RuntimeError("the media cannot be withdrawn")

    class Serving:
        ended = 0

        def __init__(self, *_: Any) -> None:
            pass

        def shutdown(self) -> None:
            Serving.ended += 1

    monkeypatch.setattr(services, "Serving", Serving)
    with pytest.raises(RuntimeError, match="cannot be withdrawn"):
        async with services.running(settings) as made:
            assert len(await redis.keys("*api*")) > 0
            monkeypatch.setattr(made.media.sources.holder, "close", fail)
    assert (left(tmp_path), Serving.ended) == ([], 1)
    assert await redis.keys("*api*") == []
