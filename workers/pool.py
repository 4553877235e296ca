"""Celery worker pool on asyncio: all tasks of the worker run on one event loop, hundreds at a time.

Two threads. Celery's hub, in the main thread, talks to the broker and keeps the books, here; the loop's thread runs the
tasks (`workers.job_runner`) and reports to a mailbox, which it wakes the hub to read.
"""

import asyncio
import logging
import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from celery import Celery, signals
from celery.app import trace
from celery.concurrency.base import BasePool
from celery.concurrency.prefork import _run_ready_callbacks
from celery.platforms import EX_FAILURE
from celery.worker import state as worker_state
from kombu.asynchronous import get_event_loop

from workers.aiotask import AioTask, drop_traceback
from workers.job_runner import Job, JobRunner, Report
from workers.loop_thread import LoopThread
from workers.pool_checks import refuse_unfit

__all__ = ["AioTask", "Job", "TaskPool", "engine_loop"]

log = logging.getLogger(__name__)

#: Seconds that a cold shutdown gives the cancelled tasks.
COLD_STOP_S = 5.0
#: Seconds that the loop has to cancel its background tasks and end.
LOOP_STOP_S = 5.0

_loop: asyncio.AbstractEventLoop | None = None


def engine_loop() -> asyncio.AbstractEventLoop:
    """The loop on which this process runs its tasks, from worker_process_init to worker_process_shutdown.

    Raises RuntimeError in a process without a running pool.
    """
    if _loop is None:
        raise RuntimeError(
            "no task loop: it exists only in a Celery worker with worker_pool='workers.pool:TaskPool', "
            "from the signal worker_process_init to worker_process_shutdown"
        )
    return _loop


class TaskPool(BasePool):
    """Runs AioTasks on one event loop and other tasks in threads: ``worker_pool='workers.pool:TaskPool'``.

    `limit` (-c) tasks run at a time; more wait here. A task in a thread has no soft limit, and at its hard limit or a
    revoke it is given up at once, while the thread runs on to its end.

    Sends worker_process_init once the loop runs, and worker_process_shutdown when all tasks have ended but the loop has
    not. A loop that dies ends the worker with exit code 1. Raises ImproperlyConfigured where it cannot work.
    """

    limit: int

    #: False: Celery must not stop the pool from a signal handler in a warm shutdown.
    signal_safe = False
    body_can_be_buffer = True

    def __init__(self, limit: int, *args: Any, app: Celery, **options: Any) -> None:
        super().__init__(limit, *args, app=app, **options)
        self._running: set[Job] = set()
        self._waiting: deque[Job] = deque()
        # A cold shutdown, in a signal handler, may read while it has interrupted a read: an Event would deadlock.
        self._mailbox: queue.SimpleQueue[tuple[Report, Job]] = queue.SimpleQueue()
        self._thread = LoopThread("tasks", self._loop_died)
        self._started = False
        # The worker passes (app, hostname), as to any pool.
        self._hostname = (self.options.get("initargs") or (None, None))[1]

    def on_start(self) -> None:
        global _loop
        self._hub = get_event_loop()
        refuse_unfit(self.app, self._hub)
        trace.traceback_clear = drop_traceback
        self._thread.start()
        self._started = True
        self._runner = JobRunner(self._thread, self._report)
        _loop = self._thread.loop
        signals.worker_process_init.send(sender=self._hostname)

    # Jobs in.

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        timeout_callback: Callable[..., Any] | None = None,
        timeout: float | None = None,
        soft_timeout: float | None = None,
        **_: Any,
    ) -> Job:
        job = Job(
            target=target,
            args=tuple(args),
            kwargs=kwargs or {},
            callback=callback,
            accept_callback=accept_callback,
            timeout_callback=timeout_callback,
            cancel=self._cancel,
            soft=soft_timeout or self.options.get("soft_timeout"),
            hard=timeout or self.options.get("timeout"),
            threaded=not isinstance(self.app.tasks.get(args[0]), AioTask),
        )
        self._waiting.append(job)
        self._start_waiting()
        return job

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self.limit and not self._thread.ending:
            job = self._waiting.popleft()
            self._running.add(job)
            self._accept(job)
            self._runner.start(job)

    def _accept(self, job: Job) -> None:
        self._call(job.accept_callback, os.getpid(), time.monotonic())

    def _cancel(self, job: Job) -> None:
        """Stop a job whose end Celery has announced, or announces as soon as the job is accepted."""
        if job in self._waiting:
            self._waiting.remove(job)
            self._accept(job)
        elif job in self._running:
            job.closed = True
            self._runner.cancel(job)

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        # The job itself is cancelled by Job.terminate, called next. Here, book what has ended meanwhile: in a cold
        # shutdown after a soft one the hub has slept, and would give back the messages of tasks that have finished.
        self._drain()

    def flush(self) -> None:
        """The channel closes: what is not accepted cannot be acked, and the broker will deliver it anew."""
        if self.app.conf.broker_transport_options.get("ack_emulation", True):
            self._drop_waiting("go back to the broker")

    def _drop_waiting(self, fate: str) -> None:
        if self._waiting:
            log.warning("%d task(s) that waited for a slot %s: %s", len(self._waiting), fate, names(self._waiting))
            self._waiting.clear()

    def grow(self, n: int = 1) -> None:
        self.limit += n
        self._start_waiting()

    def shrink(self, n: int = 1) -> None:
        """Take slots away, down to one; tasks that run keep theirs to their end."""
        self.limit = max(1, self.limit - n)

    def _get_info(self) -> dict[str, Any]:
        return {
            **super()._get_info(),
            "processes": [os.getpid()],
            "running": len(self._running),
            "waiting": len(self._waiting),
            "timeouts": (self.options.get("soft_timeout") or 0, self.options.get("timeout") or 0),
            "max-tasks-per-child": "N/A",
            "put-guarded-by-semaphore": False,
        }

    # Reports out.

    def _report(self, report: Report, job: Job) -> None:
        """Called in the loop's thread."""
        self._mailbox.put((report, job))
        self._hub.call_soon(self._on_reports)

    def _on_reports(self) -> None:
        self._drain()
        # Celery acks, and sends events, through the hub's call_soon. Called from here, within the hub, that does not
        # wake it: it would first sleep, up to a second. Called by another thread it does.
        self._thread.call_soon(self._hub.call_soon, _nothing)

    def _drain(self, wait_s: float | None = None) -> None:
        """Book all reports that are there; if there is none, wait up to `wait_s` seconds for one."""
        while True:
            try:
                report, job = self._mailbox.get(timeout=wait_s) if wait_s else self._mailbox.get_nowait()
            except queue.Empty:
                return
            wait_s = None
            self._book(report, job)

    def _book(self, report: Report, job: Job) -> None:
        if report is Report.DONE:
            self._running.discard(job)
        try:
            if not job.closed:
                self._tell(report, job)
        finally:
            self._start_waiting()

    def _tell(self, report: Report, job: Job) -> None:
        job.closed = report is not Report.SOFT
        if report is Report.SOFT:
            self._call(job.timeout_callback, True, job.soft)
        elif report is Report.HARD:
            self._call(job.timeout_callback, False, job.hard)
        elif job.outcome is not None:
            self._call(job.callback, job.outcome)

    def _call(self, callback: Callable[..., Any] | None, *args: Any) -> None:
        """A callback of Celery's that fails costs neither the hub nor a slot. sys.exit() in a task ends the worker."""
        try:
            if callback is not None:
                callback(*args)
        except BaseException as exc:
            if not isinstance(exc, Exception) and self._state == self.RUN:
                raise
            log.exception("a callback of Celery's failed: %r", callback)

    def _loop_died(self, exc: BaseException) -> None:
        """Called in the loop's thread, as its last act."""
        global _loop
        _loop = None
        log.critical("the loop of the tasks died (%r): the worker ends with code %d", exc, EX_FAILURE, exc_info=exc)
        worker_state.should_stop = EX_FAILURE
        self._hub.call_soon(_nothing)

    # The end, in the main thread: the hub runs no more.

    def on_stop(self) -> None:
        """Warm: let everything run to its end. Cold: Celery has cancelled what ran, and calls `terminate` later."""
        if is_cold():
            self._drop_waiting("are dropped by the cold shutdown")
            self._wait_until_idle(COLD_STOP_S)
            return
        if self._running or self._waiting:
            log.info("waiting for %d task(s) to end", len(self._running) + len(self._waiting))
        self._wait_until_idle(math.inf)
        self._halt()

    def on_terminate(self) -> None:
        self._waiting.clear()
        for job in list(self._running):
            self._cancel(job)
        self._wait_until_idle(COLD_STOP_S)
        self._halt()

    def _wait_until_idle(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while (self._running or self._waiting) and self._thread.alive and time.monotonic() < until:
            self._drain(0.25)
            # As prefork does: connections are kept up, and late acks sent, while a warm shutdown waits. A cold one is
            # short, and may have interrupted these very calls.
            if limit_s == math.inf and not is_cold():
                self._hub.fire_timers()
                _run_ready_callbacks(self._hub)
        self._drain()
        if self._running:
            log.error("%d task(s) did not end and are given up: %s", len(self._running), names(self._running))

    def _halt(self) -> None:
        global _loop
        if self._started:
            self._started = False
            signals.worker_process_shutdown.send(sender=self._hostname, pid=os.getpid(), exitcode=None)
            _loop = None
            self._thread.stop(LOOP_STOP_S)


def _nothing() -> None:
    pass


def is_cold() -> bool:
    """Whether a cold shutdown is under way: Celery's flag is None, False, True or an exit code (0 included)."""
    return worker_state.should_terminate is not None and worker_state.should_terminate is not False


def names(jobs: Collection[Job]) -> str:
    return ", ".join(str(job) for job in list(jobs)[:10]) + (", ..." if len(jobs) > 10 else "")
