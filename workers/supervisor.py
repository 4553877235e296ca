"""What has to live for as long as a worker does: its engine, and the tasks in its background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.engine import Engine

log = logging.getLogger(__name__)


class Supervisor:
    """`failed` is set with the first of them that ended. The worker ends then, so that it can be started anew."""

    def __init__(self, worker_id: str) -> None:
        self.failed = asyncio.Event()
        self._worker_id = worker_id
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        """None of the work may end before `stop`."""
        for one in work:
            task = asyncio.create_task(one)
            task.add_done_callback(self._must_not_end)
            self._tasks.append(task)

    async def watch(self, engine: Engine) -> None:
        """Until the engine is dead; part of the work."""
        while not engine.dead:  # noqa: ASYNC110  (vLLM sets a flag and tells nobody)
            await asyncio.sleep(0.2)
        log.critical("the engine of worker %s died; the worker ends so that it can be started anew", self._worker_id)
        self.failed.set()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _must_not_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.failed.is_set():
            return
        log.critical("a background task of worker %s ended: %r", self._worker_id, task.exception())
        self.failed.set()
