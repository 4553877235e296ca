"""Tokens on their way to the API: what engine steps add to requests."""

from __future__ import annotations

import msgspec

from app.errors.base import Failure


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """[token id, log-probability, rank, text]: the sampled token first, then the most likely ones."""

    token_id: int
    logprob: float
    rank: int | None = None
    text: str | None = None


class Delta(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What one engine step added to one request.

    `seq` counts the deltas of an attempt from 0; one with an `error` ends the attempt whatever its number. The last one
    has a `finish_reason` or an `error`, and what was `measured` (see StageTask). With the first one come
    `prompt_token_ids`, when rendering changed the prompt, `cached_tokens`, which a prefix cache had, and
    `created_cache_tokens`, which one has now. A first one without tokens is a prefill worker's, with what was asked
    about the prompt. An embedding is one delta, the last one, with the `vector`: 32-bit floats, little-endian; in JSON
    they are base64.
    """

    request: str
    attempt: int = 0
    seq: int
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    media_tokens: dict[str, int] | None = None
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None
    measured: dict[str, float] | None = None
    vector: bytes | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Failure | None = None

    @property
    def final(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def answers(self) -> bool:
        """Whether it is part of the answer, and so from the decode worker, or its end."""
        return bool(self.token_ids) or self.final


def joined(deltas: list[Delta]) -> Delta:
    """Deltas of one request that follow each other, as one with the number of the first."""
    first, last = deltas[0], deltas[-1]
    return Delta(
        request=first.request,
        attempt=first.attempt,
        seq=first.seq,
        token_ids=[token for delta in deltas for token in delta.token_ids],
        text="".join(delta.text for delta in deltas),
        logprobs=_joined_logprobs(deltas),
        prompt_logprobs=first.prompt_logprobs,
        prompt_token_ids=first.prompt_token_ids,
        media_tokens=first.media_tokens,
        cached_tokens=first.cached_tokens,
        created_cache_tokens=first.created_cache_tokens,
        measured=last.measured,
        vector=last.vector,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
    )


def _joined_logprobs(deltas: list[Delta]) -> list[list[TokenLogprob]] | None:
    if all(delta.logprobs is None for delta in deltas):
        return None
    return [one for delta in deltas for one in delta.logprobs or []]


class Batch(msgspec.Struct, omit_defaults=True):
    """All deltas of one engine step of a worker for one API process.

    `number` counts a worker incarnation's batches to that API from 1. A batch without deltas repeats the last number,
    so that the loss of a last batch shows.
    """

    worker: str
    incarnation: str
    number: int
    deltas: list[Delta] = []
