"""workers.outputs: vLLM's outputs as deltas. The objects have vLLM's attributes; the contract tests use vLLM's own."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from app.errors.serving import EngineFailed
from app.messages.deltas import Delta, TokenLogprob
from workers import outputs
from workers.engine import Prefilled


def output(**changes: Any) -> SimpleNamespace:
    completion = SimpleNamespace(
        **{
            "token_ids": (5, 6),
            "text": "ab",
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            **changes,
        }
    )
    prompt_logprobs = changes.pop("prompt_logprobs", None)
    counted = {"num_cached_tokens": 3, "num_cache_creation_tokens": 2}
    return SimpleNamespace(outputs=[completion], prompt_logprobs=prompt_logprobs, **counted)


def logprob(value: float, rank: int = 1, text: str | None = "t") -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=rank, decoded_token=text)


def test_a_step() -> None:
    step = outputs.delta(output(finish_reason="stop", stop_reason="\n"), "r", 1, 4)
    assert step == Delta(
        request="r", attempt=1, seq=4, token_ids=[5, 6], text="ab", finish_reason="stop", stop_reason="\n"
    )


def test_what_is_said_once_is_said_first() -> None:
    made = output(prompt_logprobs=[None, {7: logprob(-1.0)}])
    first, second = outputs.delta(made, "r", 0, 0), outputs.delta(made, "r", 0, 1)
    assert (first.cached_tokens, first.created_cache_tokens) == (3, 2)
    assert first.prompt_logprobs == [None, [TokenLogprob(7, -1.0, 1, "t")]]
    assert (second.cached_tokens, second.created_cache_tokens, second.prompt_logprobs) == (None, None, None)


def test_what_a_prefill_says_of_the_prompt_is_no_part_of_the_answer() -> None:
    said = outputs.of_prompt(Prefilled({}, [None, {7: logprob(-1.0)}], 3, 2), "r", 1)
    scores = [None, [TokenLogprob(7, -1.0, 1, "t")]]
    assert said == Delta(request="r", attempt=1, seq=0, prompt_logprobs=scores, cached_tokens=3, created_cache_tokens=2)
    assert not said.answers and outputs.delta(output(), "r", 1, 1).answers


def test_the_sampled_tokens_logprob_stays_first() -> None:
    made = output(logprobs=[{9: logprob(-2.0, 3), 1: logprob(-0.5, 1)}])
    assert outputs.delta(made, "r", 0, 0).logprobs == [[TokenLogprob(9, -2.0, 3, "t"), TokenLogprob(1, -0.5, 1, "t")]]


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_an_impossible_tokens_logprob_survives_json(value: float) -> None:
    made = outputs.delta(output(logprobs=[{9: logprob(value)}]), "r", 0, 0)
    back = msgspec.json.decode(msgspec.json.encode(made), type=Delta)
    assert back.logprobs == [[TokenLogprob(9, -9999.0, 1, "t")]]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_engine_that_gave_up_is_an_error(reason: str) -> None:
    with pytest.raises(EngineFailed):
        outputs.delta(output(finish_reason=reason), "r", 0, 0)
