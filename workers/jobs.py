"""The requests in flight in this worker, so that one can be stopped by its id and all of an API process by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Jobs:
    """Used on the loop that runs the stages only."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[str, asyncio.Task[object]]] = {}
        self._cancelled: set[str] = set()

    def __len__(self) -> int:
        return len(self._running)

    def ids(self) -> list[str]:
        return list(self._running)

    @contextmanager
    def running(self, request_id: str, api: str) -> Iterator[None]:
        """The current task runs the request until the block ends."""
        task = asyncio.current_task()
        assert task is not None
        self._running[request_id] = (api, task)
        try:
            yield
        finally:
            if self._running.get(request_id, ("", None))[1] is task:
                del self._running[request_id]
                self._cancelled.discard(request_id)

    def was_cancelled(self, request_id: str) -> bool:
        """Whether the request itself was cancelled, and not the task that runs it."""
        return request_id in self._cancelled

    def cancel(self, request_id: str) -> None:
        if request_id in self._running:
            self._cancelled.add(request_id)
            self._running[request_id][1].cancel()

    def cancel_of(self, api: str) -> None:
        """Stop all requests of an API process that is gone."""
        for request_id, (owner, _) in list(self._running.items()):
            if owner == api:
                self.cancel(request_id)

    def interrupt(self) -> None:
        """Stop everything, because the worker ends and not because anybody asked."""
        for _, task in self._running.values():
            task.cancel()
