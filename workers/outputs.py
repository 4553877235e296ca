"""Adapter to vLLM: its RequestOutput -> `Delta`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from app.errors.serving import EngineFailed
from app.messages.deltas import Delta, TokenLogprob

if TYPE_CHECKING:
    from workers.engine import Prefilled

#: JSON has no infinity; this is where vLLM's own answers put what is impossible.
LEAST_LOGPROB = -9999.0


def delta(output: Any, request_id: str, attempt: int, seq: int) -> Delta:
    """One step's output of a request with n=1. Raises EngineFailed when the engine gave the request up."""
    (completion,) = output.outputs
    if completion.finish_reason == "error":
        raise EngineFailed("the engine could not finish the request (see the worker's log)")
    if completion.finish_reason == "abort":
        raise EngineFailed("the engine aborted the request")
    first = seq == 0
    return Delta(
        request=request_id,
        attempt=attempt,
        seq=seq,
        token_ids=list(completion.token_ids),
        text=completion.text,
        logprobs=None if completion.logprobs is None else [_position(one) for one in completion.logprobs],
        prompt_logprobs=_prompt_logprobs(output.prompt_logprobs) if first else None,
        cached_tokens=output.num_cached_tokens if first else None,
        created_cache_tokens=output.num_cache_creation_tokens if first else None,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def of_prompt(prefilled: Prefilled, request_id: str, attempt: int) -> Delta:
    """What a prefill says of the prompt, as the request's first delta."""
    return Delta(
        request=request_id,
        attempt=attempt,
        seq=0,
        prompt_logprobs=_prompt_logprobs(prefilled.prompt_logprobs),
        cached_tokens=prefilled.cached_tokens,
        created_cache_tokens=prefilled.created_cache_tokens,
    )


def embedded(output: Any, request_id: str, attempt: int) -> Delta:
    """vLLM's PoolingRequestOutput as the request's only delta. Raises EngineFailed where it has no vector."""
    if output.error is not None or output.outputs.data.ndim != 1 or not output.outputs.data.numel():
        raise EngineFailed("the engine gave no vector for the request (see the worker's log)")
    vector = output.outputs.data.float().cpu().numpy()
    if not np.isfinite(vector).all():
        raise EngineFailed("the model's vector has values that are no numbers")
    return Delta(
        request=request_id,
        attempt=attempt,
        seq=0,
        vector=vector.astype("<f4").tobytes(),
        cached_tokens=output.num_cached_tokens,
        finish_reason="stop",
    )


def _position(candidates: Any) -> list[TokenLogprob]:
    return [TokenLogprob(token, _finite(one.logprob), one.rank, one.decoded_token) for token, one in candidates.items()]


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _prompt_logprobs(positions: Iterable[Any] | None) -> list[list[TokenLogprob] | None] | None:
    return None if positions is None else [None if one is None else _position(one) for one in positions]
