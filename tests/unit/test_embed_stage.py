"""workers.stages.embed: from a task to the only delta of its request."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors.media import MediaRefused
from app.errors.requests import PromptTooLong
from app.errors.serving import EngineFailed
from app.messages.deltas import Delta
from app.messages.prompts import Prompt
from app.messages.tasks import EmbedTask
from tests.messages import decode_task, media_ref
from workers.stages import embed

LONGEST = 4


def task(tokens: int = 3, **changes: Any) -> EmbedTask:
    common = decode_task("r").model_dump(exclude={"kv", "seq", "prompt"})
    fields = common | {"params": {"dimensions": 2}, "prompt": Prompt(token_ids=[1] * tokens)} | changes
    return EmbedTask(**fields)


class Case:
    """A worker whose engine answers every prompt with the same numbers."""

    def __init__(self, values: Any, error: Any = None) -> None:
        import torch

        self.said: list[tuple[str, Delta]] = []
        self.asked: list[Any] = []
        data = torch.tensor(values, dtype=torch.bfloat16)
        self._output = SimpleNamespace(outputs=SimpleNamespace(data=data), error=error, num_cached_tokens=2)
        engine = SimpleNamespace(renderer=SimpleNamespace(text=self._text), embed=self._embed)
        tokens = SimpleNamespace(put=lambda api, delta: self.said.append((api, delta)))
        self.host: Any = SimpleNamespace(engine=engine, tokens=tokens)

    def _text(self, prompt: Prompt, *, answer: int, param: str) -> Any:
        if len(prompt.token_ids) + answer > LONGEST:
            raise PromptTooLong("too long", param=param)
        return {"prompt_token_ids": prompt.token_ids}

    async def _embed(self, engine_input: Any, asked: EmbedTask) -> Any:
        self.asked.append((engine_input, asked.params))
        return self._output


async def test_a_vector_is_one_delta_and_the_last() -> None:
    case = Case([0.5, -1.25])
    await embed.run(case.host, task(LONGEST))
    ((api, delta),) = case.said
    assert delta.vector is not None and struct.unpack("<2f", delta.vector) == (0.5, -1.25)
    assert (api, delta.request, delta.seq, delta.final, delta.cached_tokens) == ("api-1", "r", 0, True, 2)
    assert delta.measured is None
    assert case.asked == [({"prompt_token_ids": [1] * LONGEST}, {"dimensions": 2})], "the whole context is the prompt's"


async def test_who_asks_is_told_of_the_time() -> None:
    case = Case([0.5])
    await embed.run(case.host, task(timings=True))
    measured = case.said[0][1].measured
    assert measured is not None and measured.keys() == {"queue", "prefill"}


@pytest.mark.parametrize(
    ("values", "error"),
    [([], None), ([[0.5]], None), ([float("nan"), 1.0], None), ([float("inf")], None), ([0.5], "a cache miss")],
    ids=["aborted", "of every token", "not a number", "infinite", "failed"],
)
async def test_what_is_no_vector_fails(values: Any, error: Any) -> None:
    case = Case(values, error)
    with pytest.raises(EngineFailed):
        await embed.run(case.host, task())
    assert case.said == []


async def test_a_prompt_beyond_the_context_is_refused() -> None:
    case = Case([0.5])
    with pytest.raises(PromptTooLong) as refused:
        await embed.run(case.host, task(LONGEST + 1))
    assert (refused.value.param, case.asked) == ("input", [])


async def test_no_medium_is_passed_over() -> None:
    case = Case([0.5])
    with pytest.raises(MediaRefused):
        await embed.run(case.host, task(prompt=Prompt(token_ids=[1], media=[media_ref()])))
    assert case.asked == []
