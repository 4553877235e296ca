"""Work in a thread, which nobody can stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import TypeVar

T = TypeVar("T")


class _Left(Exception):
    pass


async def unbroken(job: Callable[[], T]) -> T:
    """Run it in a thread. A caller that is cancelled waits for it if it has begun: what it makes can then be undone,
    and what it uses is free. What has not begun never does."""
    left = Event()

    def begin() -> T:
        if left.is_set():
            raise _Left
        return job()

    running = asyncio.ensure_future(asyncio.to_thread(begin))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        left.set()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()
        raise
