"""Until when a request may take, and that its work takes no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from app.errors.requests import InvalidRequest
from app.errors.serving import DeadlineExceeded

T = TypeVar("T")

TIMEOUT_HEADER = "x-request-timeout"


def of(request: Request, limit_s: float) -> float:
    """The request's, in unix seconds: what it asks for, and `limit_s` at most. Raises InvalidRequest."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return time.time() + limit_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a positive number of seconds", param=TIMEOUT_HEADER)
    return time.time() + min(seconds, limit_s)


async def within(deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """What the work answers. Raises DeadlineExceeded at `deadline` (unix time), and as the work does before.

    vLLM takes the cancellation for a client that left, and makes an answer or an error of it: neither is for anybody.
    """
    limit = asyncio.timeout(deadline - time.time())
    try:
        async with limit:
            found = await work
    except Exception:
        if not limit.expired():
            raise
    if limit.expired():
        raise DeadlineExceeded("the request's deadline passed")
    return found
