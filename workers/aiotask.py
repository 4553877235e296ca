"""Celery tasks with a coroutine as body, under Celery's own tracer.

The tracer is synchronous, so each runs in a greenlet on the event loop's thread. When the task's body turns out to be
an awaitable, the greenlet hands it to the coroutine that drives it, which awaits it on the loop. Thereby retry, Ignore,
signals, on_failure and events are Celery's own.
"""

import asyncio
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from celery import Task
from greenlet import getcurrent, greenlet

_current: ContextVar[tuple[Task, Any] | None] = ContextVar("current_task_request", default=None)

WRONG_POOL = (
    "task {name!r} has an async body, which only the pool of this project can run: start the worker without -P, or set "
    "worker_pool='workers.pool:TaskPool' (to call the body from a coroutine: await task.run(...))"
)


class TracerGreenlet(greenlet):
    """Runs a tracer; its being current tells that an event loop stands behind the caller."""


class AioTask(Task):
    """Base of tasks with an ``async def`` body: ``@app.task(base=AioTask)``; many run at once on the pool's loop.

    The body sees ``asyncio.CancelledError`` when the task is revoked with ``terminate=True``, at its soft time limit
    (for Celery the task then failed with ``SoftTimeLimitExceeded``), at its hard limit and at a cold shutdown. It may
    catch it to clean up; after a soft limit it may still return a result. Whoever calls ``cancel()`` on the job's
    asyncio task ends it as revoked. ``self.request`` works in the body. ``self.retry`` and ``apply_async`` hold the
    loop for a round trip to the broker. A body that is not ``async`` runs on the loop as well, and holds it.

    Raises RuntimeError on any other pool, rather than reporting success for a coroutine that never ran.
    """

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Celery keeps the request per greenlet, but the body is awaited in another one; they share a context.
        token = _current.set((self, Task._get_request(self)))
        try:
            return self._completed(self.run(*args, **kwargs))
        finally:
            _current.reset(token)

    def __setattr__(self, name: str, value: Any) -> None:
        # autoretry_for wraps _orig_run in try/except: an exception must come out of the call, not of a later await.
        if name == "_orig_run":
            value = self._completing(value)
        super().__setattr__(name, value)

    def _completing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def completed(*args: Any, **kwargs: Any) -> Any:
            return self._completed(function(*args, **kwargs))

        return completed

    def _completed(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        tracer = getcurrent()
        if isinstance(tracer, TracerGreenlet):
            return tracer.parent.switch(result)
        if inspect.iscoroutine(result):
            result.close()
        raise RuntimeError(WRONG_POOL.format(name=self.name))

    def _get_request(self) -> Any:
        current = _current.get()
        return current[1] if current is not None and current[0] is self else Task._get_request(self)

    request = property(_get_request)


async def drive(
    tracer: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_cancel: Callable[[asyncio.CancelledError], BaseException],
) -> Any:
    """Run a tracer in a greenlet, await what an AioTask in it hands up, and return the tracer's result.

    `on_cancel` turns the CancelledError that ended the awaitable into what the tracer shall see.
    """
    running = TracerGreenlet(tracer)
    running.gr_context = getcurrent().gr_context
    outcome = running.switch(*args, **kwargs)
    while not running.dead:
        outcome = await _await_for(running, outcome, on_cancel)
    return outcome


async def _await_for(
    tracer: TracerGreenlet, awaitable: Awaitable[Any], on_cancel: Callable[[asyncio.CancelledError], BaseException]
) -> Any:
    try:
        value = await awaitable
    except asyncio.CancelledError as exc:
        seen = on_cancel(exc)
        return tracer.throw(type(seen), seen, exc.__traceback__)
    except BaseException as exc:
        return tracer.throw(type(exc), exc, exc.__traceback__)
    return tracer.switch(value)


def drop_traceback(exc: BaseException | None = None) -> None:
    """Replaces the tracer's ``traceback_clear``, with the same purpose: no failed task's frames are kept alive.

    That one clears each frame of the traceback, and to clear the frame of a suspended coroutine is to close it: a
    background coroutine that passed its exception to a task (``future.set_exception``) and went on would be killed.
    """
    exc = exc or sys.exc_info()[1]
    if exc is not None:
        exc.__traceback__ = None
