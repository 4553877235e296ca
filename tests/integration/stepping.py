"""Cancels work at a chosen one of its await points, those of the tasks that it starts included."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any


class Steps:
    """Counts down to the await point at which `task` is cancelled."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.task: asyncio.Task[Any] | None = None

    def took_one(self) -> None:
        self.left -= 1
        if self.left == 0 and self.task is not None:
            self.task.cancel()


class Stepped(Coroutine[Any, Any, Any]):
    """A coroutine each of whose await points counts."""

    def __init__(self, inner: Coroutine[Any, Any, Any], steps: Steps) -> None:
        self._inner = inner
        self._steps = steps

    def send(self, value: Any) -> Any:
        waited_for = self._inner.send(value)
        self._steps.took_one()
        return waited_for

    def throw(self, *error: Any) -> Any:
        waited_for = self._inner.throw(*error)
        self._steps.took_one()
        return waited_for

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()


_counted: ContextVar[Steps | None] = ContextVar("counted", default=None)


async def cancelled_at(step: int, work: Coroutine[Any, Any, Any]) -> bool:
    """Run the work and cancel it at its `step`-th await point; False if it ended before."""
    steps, loop = Steps(step), asyncio.get_running_loop()

    def factory(of: Any, coroutine: Any, **more: Any) -> Any:
        counted = _counted.get()
        return asyncio.Task(coroutine if counted is None else Stepped(coroutine, counted), loop=of, **more)

    before = loop.get_task_factory()
    loop.set_task_factory(factory)
    token = _counted.set(steps)
    try:
        steps.task = loop.create_task(work)
    finally:
        _counted.reset(token)
    try:
        await asyncio.wait([steps.task])
    finally:
        loop.set_task_factory(before)
    if not steps.task.cancelled():
        steps.task.result()
    return steps.left <= 0
