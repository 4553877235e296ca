"""Adapter to vLLM: deltas -> what its engine would answer."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from vllm.exceptions import GenerationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput

from app.errors.base import TrivetError
from app.messages.deltas import Delta, TokenLogprob


class PipelineError(GenerationError):
    """A TrivetError on its way through vLLM's serving code; the context keeps the original."""

    def __init__(self, error: TrivetError) -> None:
        super().__init__(error.message)
        self.status_code = HTTPStatus(error.status)


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


def pooled(request_id: str, token_ids: list[int], final: Delta) -> PoolingRequestOutput:
    """Of a prompt with these tokens."""
    assert final.vector is not None, "the answer of a task that embeds"
    data = torch.from_numpy(np.frombuffer(final.vector, "<f4").copy())  # a tensor wants to be written to
    return PoolingRequestOutput(request_id, PoolingOutput(data), token_ids, final.cached_tokens or 0, finished=True)
