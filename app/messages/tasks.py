"""The tasks of the stages: the keyword arguments of Celery's."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from app import keys
from app.messages.base import Message
from app.messages.media import MediaRef
from app.messages.plans import Assignment, Plan
from app.messages.prompts import Prompt, RenderedPrompt


class KVHandoff(Message):
    """Where the prefilled KV blocks lie. `params` is vLLM's `kv_transfer_params`, verbatim; they may be read until
    `expires_at` (unix seconds). `cached_tokens` and `created_cache_tokens` are as in `Delta`, of the prefill worker:
    for the one that decodes all blocks come from elsewhere."""

    params: dict[str, Any]
    expires_at: float
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


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
