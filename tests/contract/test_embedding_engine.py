"""What the worker takes of vLLM for models that make embeddings."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from app import ports, vllm_reasoning
from app.errors.requests import InvalidRequest
from app.errors.serving import WorkerLost
from app.messages.prompts import Prompt
from app.messages.tasks import EmbedTask
from app.roles import Does
from app.settings import Settings
from tests.messages import decode_task
from workers import engine_args, model_kind
from workers.preflight import MisconfiguredWorker


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What an engine's environment needs is gone after each test."""
    with mock.patch.dict(os.environ):
        before = len(ports._held)
        yield
        for held in ports._held[before:]:
            held.close()
        del ports._held[before:]


def of(model: Path, args: str = "") -> Settings:
    return Settings(model=str(model), engine={"args": f"--max-model-len 2048 --dtype float32 {args}"})


def test_a_model_says_what_it_does(tiny: Path, embedding_model: Path) -> None:
    assert model_kind.of(of(embedding_model)) is Does.EMBED
    assert model_kind.of(of(tiny)) is Does.GENERATE
    assert model_kind.of(of(embedding_model, "--runner generate")) is Does.GENERATE
    assert model_kind.of(of(tiny, "--runner pooling")) is Does.EMBED
    with pytest.raises(MisconfiguredWorker, match="start more workers, without --data-parallel-size"):
        model_kind.of(of(embedding_model, "--data-parallel-size 2"))


def test_its_last_token_is_what_it_pools(embedding_model: Path) -> None:
    config = engine_args.parsed(of(embedding_model)).create_model_config()
    assert (config.pooler_config.seq_pooling_type, config.pooler_config.use_activation) == ("LAST", True)
    assert (config.is_matryoshka, config.matryoshka_dimensions, config.embedding_size) == (True, [32, 64, 128], 128)


def test_it_has_no_reasoning(embedding_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_reasoning, "of_model", lambda *_: "qwen3")  # as the published ones' templates have it
    assert vllm_reasoning.of(None, engine_args.parsed(of(embedding_model))) == ""
    assert vllm_reasoning.of(None, engine_args.parsed(of(embedding_model, "--runner generate"))) == "qwen3"


class Llm:
    """An AsyncLLM that answers, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[Any] = []
        self.closed = False

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncGenerator[str, None]:
        self.asked.append((prompt, pooling_params, request_id, lora_request, priority))
        try:
            if self.error is not None:
                raise self.error
            yield "vector"
        finally:
            self.closed = True

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("classify",)


def engine(llm: Llm) -> Any:
    from workers.engine import Engine

    made: Any = object.__new__(Engine)
    made._llm, made.loras = llm, SimpleNamespace(request=lambda adapter: f"lora {adapter}")
    return made


def task(**params: Any) -> EmbedTask:
    common = decode_task("r").model_dump(exclude={"kv", "seq", "prompt", "params"})
    return EmbedTask(prompt=Prompt(token_ids=[1]), params=params, **common | {"priority": 3, "adapter": "sql"})


async def test_the_engine_gets_vllms_parameters(vllm: Any) -> None:
    llm = Llm()
    assert await engine(llm).embed({"prompt_token_ids": [1]}, task(dimensions=32, use_activation=False)) == "vector"
    ((prompt, params, name, adapter, priority),) = llm.asked
    assert (prompt, name, adapter, priority) == ({"prompt_token_ids": [1]}, "r", "lora sql", 3)
    assert (params.task, params.dimensions, params.use_activation) == ("embed", 32, False)
    assert llm.closed and not await engine(llm).embeds()


async def test_what_the_engine_says_is_told_in_our_words(vllm: Any) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError

    for error, told in (
        (VLLMValidationError("no such dimensions"), InvalidRequest),
        (ValueError("too long"), InvalidRequest),
        (EngineDeadError(), WorkerLost),
    ):
        llm = Llm(error)
        with pytest.raises(told):
            await engine(llm).embed({}, task())
        assert llm.closed


def test_vllms_engine_takes_what_we_give(vllm: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    inspect.signature(AsyncLLM.encode).bind(None, {}, None, "r", lora_request=None, priority=0)
