"""Work that has to reach its end although whoever waits for it is cancelled, and again at each further wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

_ending: set[asyncio.Task[None]] = set()


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run it in a task of its own. Starlette cancels a stream whose client left at every await of its clean-up."""
    task = asyncio.create_task(work)
    _ending.add(task)
    task.add_done_callback(_ended)
    await asyncio.shield(task)


def _ended(task: asyncio.Task[None]) -> None:
    _ending.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a request was not cleaned up", exc_info=error)
