"""The API's serving layer, built once without parsers and once with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from app import tiny_model
from app.media import MediaHolder
from app.settings import Settings
from tests.contract.serving import Pipeline, Surface, untried
from tests.planes import Plane

#: What models write around tool calls and reasoning.
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def settings(model: Path, **api: Any) -> Settings:
    return Settings(
        model=str(model),
        served_model_name="tiny",
        enable_multimodal=True,
        engine={"args": "--max-model-len 2048 --dtype float32"},
        api=api,
    )


def built(chosen: Settings) -> Iterator[Any]:
    from api.vllm_serving import Serving

    made = Serving(chosen, Pipeline(), untried)  # type: ignore[arg-type]
    yield made
    made.shutdown()


@pytest.fixture(scope="session")
def tiny(vllm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def serving(tiny: Path) -> Iterator[Any]:
    yield from built(settings(tiny))


@pytest.fixture(scope="session")
def parsing_serving(vllm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a model that calls tools and reasons."""
    from transformers import AutoTokenizer

    model = tiny_model.build(tmp_path_factory.mktemp("parsed") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(MARKS)
    tokenizer.save_pretrained(model)
    yield from built(settings(model, tool_call_parser="hermes", reasoning_parser="qwen3"))


@pytest.fixture(scope="session")
def embedding_model(vllm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("embedding") / "tiny", "qwen3_embedding")


@pytest.fixture(scope="session")
def embedding_serving(embedding_model: Path) -> Iterator[Any]:
    yield from built(settings(embedding_model).model_copy(update={"enable_multimodal": False}))


@pytest.fixture
def pipeline(serving: Any) -> Any:
    fresh = serving.client._pipeline
    fresh.__init__()
    return fresh


async def _surface(serving: Any, folder: Path) -> AsyncIterator[Surface]:
    holder = MediaHolder(Plane(), folder, 10_000_000)
    made = Surface(serving, settings(folder), holder)
    made.pipeline.__init__()
    yield made
    await made.http.aclose()
    assert holder.users == 0, "media that nobody released"
    await holder.close()


@pytest.fixture
async def surface(serving: Any, tmp_path: Path) -> AsyncIterator[Surface]:
    async for one in _surface(serving, tmp_path):
        yield one


@pytest.fixture
async def parsing(parsing_serving: Any, tmp_path: Path) -> AsyncIterator[Surface]:
    async for one in _surface(parsing_serving, tmp_path):
        yield one


@pytest.fixture
async def embedding(embedding_serving: Any, tmp_path: Path) -> AsyncIterator[Surface]:
    async for one in _surface(embedding_serving, tmp_path):
        yield one
