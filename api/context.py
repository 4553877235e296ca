"""What one HTTP request carries from its route to the pipeline, past vLLM's serving code in between."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from app.errors import Failure


@dataclass
class RequestContext:
    """`deadline` is in unix seconds. `failure` is what ended the request, for the route to put into words."""

    deadline: float
    failure: Failure | None = None


_current: ContextVar[RequestContext] = ContextVar("request_context")


def enter(context: RequestContext) -> None:
    _current.set(context)


def current() -> RequestContext:
    return _current.get()
