"""What the stages tell each other: JSON, validated on arrival, references and no tensors.

Tasks travel as Celery keyword arguments (pydantic); token deltas, thousands a second, as msgspec structs.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from app import keys
from app.errors.base import Failure

Modality = Literal["image", "video", "audio"]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Descriptor(Message):
    """Where a buffer lies that another process may read: all that the tensor plane needs to fetch it.

    `agent` is the holder's NIXL agent, `address` the buffer's in its memory and `metadata` (base64) what NIXL wants to
    know of both. A reader with the same `host` opens `path` instead. `nonce` differs for each buffer that ever lay
    there; `dtype` and `shape` say what the `nbytes` of payload are. Readable until `expires_at` (unix seconds), and a
    reader has to expect that the holder took it away before.
    """

    agent: str
    host: str
    path: str
    address: int = Field(ge=0)
    metadata: str
    name: str
    nonce: str = Field(pattern=r"^[0-9a-f]{16}$")
    dtype: str
    shape: list[int]
    nbytes: int = Field(gt=0)
    expires_at: float


class MediaRef(Message):
    """One medium of a prompt. `identity` names its content, `param` the part of the request that it came in.

    `size` is in bytes; `media_type` is given where the bytes alone do not tell how to read them (`video/jpeg`: frames
    as base64 text, comma-separated). `source` is where the bytes lie; None where somebody has the medium's embedding.
    `processor_kwargs` are the request's own settings for the model's processor; the identity is theirs, too.
    """

    modality: Modality
    identity: str = Field(pattern=r"^[0-9a-f]{32,64}$")
    size: int = Field(gt=0)
    media_type: str = ""
    param: str
    source: Descriptor | None = None
    processor_kwargs: dict[str, Any] | None = None


class Prompt(Message):
    """A prompt as the API knows it: one placeholder token per medium, not yet expanded; media in order."""

    token_ids: list[int] = Field(min_length=1)
    media: list[MediaRef] = []
    cache_salt: str | None = None


class FieldValue(Message):
    """One processor output that is no pixel data (grids, timestamps), in JSON.

    A tensor has `dtype` and `shape` and its values flat, row-major, those that are not finite as text; where `times` is
    given, each value of `data` that many times (an audio's mask is tens of thousands of ones and zeros). A plain number
    or nested list has `dtype` None, and tensors in a list are objects of `dtype`, `shape`, `data` and `times`. `kind`
    and `dim` say how the model joins the values of several items (vLLM's field kinds).
    """

    kind: Literal["batched", "flat", "shared"]
    dim: int = 0
    dtype: str | None = None
    shape: list[int] = []
    data: list[Any] | bool | int | float
    times: list[int] | None = None


class RenderedItem(Message):
    """One medium in a rendered prompt, without its pixels.

    `offset` and `length` count prompt tokens. `embed_runs` are the lengths of alternating runs of the placeholder's
    embed mask, starting with a run of "not embedded"; None means that every token of the placeholder is.
    `fields` are the processor's outputs that positions depend on (vLLM's `keep_on_cpu` fields).
    """

    modality: Modality
    identity: str
    offset: int = Field(ge=0)
    length: int = Field(gt=0)
    embed_runs: list[int] | None = None
    fields: dict[str, FieldValue]


class RenderedPrompt(Message):
    """A prompt as the engine takes it, placeholders expanded, pixels left out."""

    token_ids: list[int] = Field(min_length=1)
    items: list[RenderedItem] = []
    cache_salt: str | None = None


class KVHandoff(Message):
    """Where the prefilled KV blocks lie. `params` is vLLM's `kv_transfer_params`, verbatim; they may be read until
    `expires_at` (unix seconds). `cached_tokens` and `created_cache_tokens` are as in `Delta`, of the prefill worker:
    for the one that decodes all blocks come from elsewhere."""

    params: dict[str, Any]
    expires_at: float
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class Assignment(Message):
    """A worker chosen for a stage. `incarnation` tells a restarted worker from the one that was chosen."""

    worker: str
    incarnation: str


class Plan(Message):
    """Who runs each stage. Equal assignments are one task: a stage whose worker is the next one's too is no task.

    Without `decode`, the worker that prefills has it chosen when it hands over. Ranks are those of the engines' data
    parallelism. `encode` has an encode worker for each item (by identity) that nobody holds or encodes yet; items that
    are not in it are taken from a holder, waited for, or encoded by the worker that prefills.
    """

    prefill: Assignment
    decode: Assignment | None = None
    prefill_rank: int = Field(0, ge=0)
    decode_rank: int = Field(0, ge=0)
    encode: dict[str, Assignment] = {}

    @property
    def aggregated(self) -> bool:
        return self.prefill == self.decode

    @property
    def workers(self) -> tuple[Assignment, ...]:
        """Those of prefill and decode that are chosen by now."""
        if self.decode is None or self.aggregated:
            return (self.prefill,)
        return (self.prefill, self.decode)


class Task(Message):
    """What every task knows of its request. `deadline` is in unix seconds."""

    request_id: str = Field(min_length=1, max_length=256)
    attempt: int = Field(ge=0)
    api: str
    model: str
    deadline: float

    @property
    def expires_at(self) -> float:
        """When nobody has to look at the task any more, in unix seconds."""
        return self.deadline


class EncodeTask(Task):
    """Encode one item and announce it. `assigned` is who holds the claim on it: anybody else leaves it alone."""

    item: MediaRef
    assigned: Assignment

    @property
    def expires_at(self) -> float:
        """Whoever takes it too late gives the claim up, and does not just drop it: others wait."""
        return self.deadline + keys.CANCELLED_TTL_S


class StageTask(Task):
    """What prefill and decode know of a request. `params` is vLLM's SamplingParams as builtins (but see EmbedTask).

    `session` and `tenant` are for whoever chooses the next worker, which is none of `avoid`: they failed the request
    before. `adapter` is the id of the one to run with, and "" the model itself. With `timings`, the stages measure:
    `measured` has milliseconds, each by one host's clock, of what came before (`queue`, `encode`, `prefill`,
    `transfer`, `decode`), and in `encoded_items` how many items were encoded with the prompt.
    """

    plan: Plan
    params: dict[str, Any]
    priority: int = 0
    session: str = ""
    tenant: str = ""
    adapter: str = ""
    avoid: list[Assignment] = []
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    timings: bool = False
    measured: dict[str, float] = {}


class PrefillTask(StageTask):
    """Fill the KV cache with the prompt and hand its blocks to the decode worker."""

    prompt: Prompt


class DecodeTask(StageTask):
    """Generate. With `kv`, the prompt comes rendered and its blocks are pulled; without, this worker prefills too.

    `seq` is the number of the first delta here: those before it came from the prefill worker.
    """

    prompt: Prompt | RenderedPrompt
    kv: KVHandoff | None = None
    seq: int = Field(0, ge=0)

    @property
    def expires_at(self) -> float:
        """The blocks may outlive the deadline, and want to be freed."""
        return self.deadline if self.kv is None else max(self.deadline, self.kv.expires_at)


class EmbedTask(StageTask):
    """Make one vector of the prompt, in one go on a worker that prefills and decodes: it lies in that one's decode
    queue. `params` are vLLM's PoolingParams that a client may set: `dimensions` and `use_activation`."""

    prompt: Prompt


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
