"""Work in a thread, which nobody can stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def unbroken(job: Callable[[], T]) -> T:
    """Run it in a thread. A caller that is cancelled waits for it: what it makes can then be undone, and what it uses
    is free."""
    running = asyncio.ensure_future(asyncio.to_thread(job))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()
        raise
