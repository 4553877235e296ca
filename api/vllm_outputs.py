"""Adapter to vLLM: deltas -> what its engine would answer."""

from __future__ import annotations

from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from app.messages import Delta, TokenLogprob


def completion(index: int, one: Delta) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=one.text,
        token_ids=one.token_ids,
        cumulative_logprob=sum(position[0].logprob for position in one.logprobs) if one.logprobs else None,
        logprobs=None if one.logprobs is None else [_position(candidates) for candidates in one.logprobs],
        finish_reason=one.finish_reason,
        stop_reason=one.stop_reason,
    )


def prompt_logprobs(first: Delta) -> Any:
    """Of each prompt token but the first, which has None."""
    if first.prompt_logprobs is None:
        return None
    return [None if one is None else _position(one) for one in first.prompt_logprobs]


def _position(candidates: list[TokenLogprob]) -> dict[int, Logprob]:
    return {one.token_id: Logprob(one.logprob, one.rank, one.text) for one in candidates}


def one_of(parts: list[RequestOutput]) -> RequestOutput:
    """The choices of one request, each whole, as vLLM answers them together."""
    whole = parts[0]
    whole.outputs = [part.outputs[0] for part in parts]
    whole.finished = True
    return whole
