"""What one HTTP request carries from its route to the pipeline, past vLLM's serving code in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from api import metrics
from app.errors.base import Failure
from app.routing import Decision

if TYPE_CHECKING:
    from api.timings import Timings

log = logging.getLogger(__name__)

#: Inputs of one request for embeddings that are with the workers at a time; its others wait.
INPUTS_AT_ONCE = 128


class NamedAdapter(NamedTuple):
    """An adapter by the name that a request called it, and by its id (`app.adapter_registry`)."""

    name: str
    id: str


@dataclass
class RequestContext:
    """`deadline` is in unix seconds, `tenant` tells whose key came with the request. `failure` is what ended it, for
    the route to put into words. `adapter` is the one that it names as its model.

    `media_tokens` is filled with the first output: how many tokens a medium takes, only the worker knows. `session` and
    `priority` are for the router, which answers with `decisions`, one for each choice and migration. `timings` are
    there if the client asks for them. `inputs` is the turn of each input of a request that has many, and `over` says
    that none begins any more.
    """

    request_id: str
    deadline: float
    tenant: str = ""
    session: str = ""
    priority: int = 0
    adapter: NamedAdapter | None = None
    failure: Failure | None = None
    timings: Timings | None = None
    media_tokens: dict[str, int] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    on_close: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    inputs: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(INPUTS_AT_ONCE))
    over: bool = False

    def decided(self, decision: Decision) -> None:
        """The request, or one choice of its answer, has its place."""
        self.decisions.append(decision)
        metrics.routed(decision.reasons)

    async def close(self) -> None:
        """Stop whatever still runs for the request, and let go what it holds: the last first, and each once."""
        while self.on_close:
            try:
                await self.on_close.pop()()
            except Exception:
                log.exception("request %s: something of it was not closed", self.request_id)


_current: ContextVar[RequestContext] = ContextVar("request_context")


def enter(context: RequestContext) -> None:
    _current.set(context)


def current() -> RequestContext:
    return _current.get()


def adapter() -> NamedAdapter | None:
    """The current request's."""
    found = _current.get(None)
    return None if found is None else found.adapter
