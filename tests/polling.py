"""Waiting in tests: for a condition, up to a limit, and never for a fixed time."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest


async def until(condition: Callable[[], Any], what: str, limit_s: float = 10.0) -> Any:
    """The first true value of the condition, which may be a coroutine function; the test fails without one."""
    end = time.monotonic() + limit_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            pytest.fail(f"not within {limit_s:g} s: {what}")
        await asyncio.sleep(0.01)
