"""Requests that run on without a client, until somebody cancels them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from app import cancellation

log = logging.getLogger(__name__)


class Background:
    """Those of this API process, by the ids of their responses. `redis` is an asyncio client."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(self, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run it, in this task's context. It must say itself how it ended."""
        task = asyncio.create_task(work)
        self._running[response_id] = task
        task.add_done_callback(lambda done: self._ended(response_id, done))
        await asyncio.sleep(0)  # one that is cancelled before its first step never runs, not even its `finally`

    async def cancel(self, response_id: str) -> None:
        """Stop the response in whichever API process it runs. Raises RedisError or OSError."""
        self._cancel(response_id)
        # Ids of responses and of requests to workers don't meet: these have a suffix.
        await cancellation.cancel(self._redis, response_id)

    async def listen(self) -> None:
        """For ever: stop what other API processes were asked to cancel."""
        await cancellation.listen(self._redis, self._cancel, lambda: list(self._running))

    async def stop(self) -> None:
        """End all, and wait until they have said so."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, response_id: str) -> None:
        if (task := self._running.get(response_id)) is not None:
            task.cancel()

    def _ended(self, response_id: str, task: asyncio.Task[None]) -> None:
        del self._running[response_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("response %s in the background was not brought to its end", response_id, exc_info=error)
