"""The loop's side of the pool: runs jobs, each as an asyncio task, within their time limits."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.exceptions import SoftTimeLimitExceeded, Terminated

from workers.aiotask import drive
from workers.loop_thread import LoopThread

log = logging.getLogger(__name__)

#: Seconds that a cancelled task has to clean up before it is warned about and cancelled again.
CANCEL_GRACE_S = 10.0

#: What Celery's tracer returns: whether it failed, the result's repr or an ExceptionInfo, the runtime in seconds.
Outcome = tuple[int, Any, float]


class Report(Enum):
    """What the loop thread tells the hub about a job."""

    SOFT = auto()
    HARD = auto()
    DONE = auto()


@dataclass(slots=True, weakref_slot=True, eq=False)
class Job:
    """One task in the pool. Celery keeps a weak reference to it, on which revoke and cold shutdown call `terminate`."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    callback: Callable[..., Any] | None
    accept_callback: Callable[..., Any] | None
    timeout_callback: Callable[..., Any] | None
    cancel: Callable[["Job"], None]
    #: Time limits in seconds.
    soft: float | None
    hard: float | None
    threaded: bool
    #: Celery knows how the job ended. Written by the hub's thread.
    closed: bool = False
    # The loop's, up to the job's last report.
    limit: Report | None = None
    task: asyncio.Task[Outcome] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    outcome: Outcome | None = None

    def terminate(self, signal: int | None = None) -> None:
        self.cancel(self)

    def __str__(self) -> str:
        return "{}[{}]".format(*self.args[:2]) if len(self.args) > 1 else repr(self.target)


class JobRunner:
    """Runs jobs on a loop and reports on them; `report` is called in the loop's thread.

    `start` and `cancel` may be called from any thread, and do nothing once the loop has ended.
    """

    def __init__(self, thread: LoopThread, report: Callable[[Report, Job], None]) -> None:
        self._thread = thread
        self._loop = thread.loop
        self._report = report

    def start(self, job: Job) -> None:
        self._thread.call_soon(self._launch, job)

    def cancel(self, job: Job) -> None:
        self._thread.call_soon(self._cancel, job)

    def _launch(self, job: Job) -> None:
        if job.closed:
            self._report(Report.DONE, job)
            return
        job.task = self._loop.create_task(self._trace(job), name=str(job))
        # Not in the coroutine: one that is cancelled before its first step never runs, not even its finally.
        job.task.add_done_callback(lambda task: self._finish(job, task))
        if job.hard:
            job.timers.append(self._loop.call_later(job.hard, self._expire, job, Report.HARD))
        if job.soft and not job.threaded:
            job.timers.append(self._loop.call_later(job.soft, self._expire, job, Report.SOFT))

    async def _trace(self, job: Job) -> Outcome:
        try:
            outcome: Outcome
            if job.threaded:
                outcome = await asyncio.to_thread(job.target, *job.args, **job.kwargs)
            else:
                outcome = await drive(job.target, job.args, job.kwargs, lambda exc: self._for_celery(job, exc))
            return outcome
        except asyncio.CancelledError:
            raise
        except BaseException:
            return 1, ExceptionInfo(), 0.0

    def _for_celery(self, job: Job, exc: asyncio.CancelledError) -> BaseException:
        """What the tracer shall see of a CancelledError: it records an Exception as failure and lets the rest pass."""
        if job.closed or job.limit is Report.HARD:
            return exc
        if job.limit is Report.SOFT:
            expired: BaseException = SoftTimeLimitExceeded(job.soft)
            return expired
        if job.task is not None and job.task.cancelling():
            return exc
        return RuntimeError("the task's body let out a CancelledError, though nobody cancelled the task")

    def _finish(self, job: Job, task: asyncio.Task[Outcome]) -> None:
        for timer in job.timers:
            timer.cancel()
        if not task.cancelled():
            job.outcome = task.result()
        elif not self._thread.ending:
            job.outcome = _revoked()
        # Else none: the worker is lost, and Celery must not acknowledge the message.
        self._report(Report.DONE, job)

    def _expire(self, job: Job, limit: Report) -> None:
        if job.task is None or job.task.done():
            return
        job.limit = limit
        self._report(limit, job)
        if limit is Report.HARD:
            self._cancel(job)
        else:
            job.task.cancel()

    def _cancel(self, job: Job) -> None:
        if job.task is not None and not job.task.done():
            job.task.cancel()
            job.timers.append(self._loop.call_later(CANCEL_GRACE_S, self._cancel_again, job))

    def _cancel_again(self, job: Job) -> None:
        log.warning("task %s was cancelled %.0f s ago and still holds its slot: cancelled again", job, CANCEL_GRACE_S)
        self._cancel(job)


def _revoked() -> Outcome:
    try:
        raise Terminated("cancelled")
    except Terminated:
        return 1, ExceptionInfo(), 0.0
