"""Celery bootstep: the engine is up before the first task is taken, and down before the process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import psutil
from celery import Celery, bootsteps
from celery.worker import state

from app import settings
from workers import host as hosting
from workers.draining import turn_away
from workers.pool import engine_loop
from workers.preflight import MisconfiguredWorker

log = logging.getLogger(__name__)

#: Exit code of a worker that could not start, or whose engine died (EX_SOFTWARE).
FAILED = 70

#: Longest wait for what others are told through Redis; once Redis has been slow, it gets `IMPATIENT_S` from then on.
PATIENCE_S = 5.0
IMPATIENT_S = 0.5
SLOW_S = 2.0
#: Longest `Host.stop`, whose steps have limits of their own.
STOP_S = 10.0

T = TypeVar("T")


class EngineStep(bootsteps.StartStopStep):
    """Runs between the pool, on whose loop the engine lives, and the consumer, which takes tasks."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **_: Any) -> None:
        self.host: hosting.Host | None = None
        self._patience_s = PATIENCE_S

    def start(self, worker: Any) -> None:
        chosen = settings.current()
        log.info("worker %s: loading %s", worker.hostname, chosen.model or "(no model)")
        started = time.monotonic()
        self.host = hosting.Host(chosen, worker.hostname, worker.concurrency)
        try:
            self._wait(self.host.start(), chosen.engine.start_timeout_s)
        except Exception as error:
            log.critical(
                "worker %s cannot start: %s: %s",
                worker.hostname,
                type(error).__name__,
                error,
                exc_info=_unexpected(error),
            )
            _end_now(FAILED, self.host)
        hosting.install(self.host)
        asyncio.run_coroutine_threadsafe(_end_with_engine(self.host, worker), engine_loop())
        log.info("worker %s: engine up in %.1f s", worker.hostname, time.monotonic() - started)

    def close(self, worker: Any) -> None:
        """First step of a shutdown: no new requests, while those in flight go on."""
        if self.host is not None:
            self._tell(self.host.drain())

    def stop(self, worker: Any) -> None:
        """Warm shutdown: wait for the requests in flight, unless a second signal asks for more haste."""
        if self.host is None:
            return
        while len(self.host.jobs) and not state.should_terminate:
            self._tell(turn_away(self.host))
            time.sleep(0.1)
        if len(self.host.jobs):
            return self.terminate(worker)
        self._tell(turn_away(self.host))
        self._stop(self.host)

    def terminate(self, worker: Any) -> None:
        """Cold shutdown: end the requests in flight with an error for their clients."""
        if self.host is None:
            return
        self._tell(turn_away(self.host))
        engine_loop().call_soon_threadsafe(self.host.cancel_all)
        until = time.monotonic() + 3.0
        while len(self.host.jobs) and time.monotonic() < until:
            time.sleep(0.05)
        self._stop(self.host)

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of `work`, unless a signal asks the process to end meanwhile."""
        future = asyncio.run_coroutine_threadsafe(work, engine_loop())
        until = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                if future.done():
                    raise
            if state.should_stop is not None or state.should_terminate:
                log.warning("stopped while the engine was loading")
                _end_now(0, self.host)
            if time.monotonic() > until:
                raise TimeoutError(f"the engine was not up after {timeout_s:.0f} s (engine.start_timeout_s)")

    def _stop(self, host: hosting.Host) -> None:
        self.host = None
        try:
            self._call(host.stop(), STOP_S)
        finally:
            host.remove_memory()

    def _tell(self, work: Coroutine[Any, Any, None]) -> None:
        """What others are told. A Redis that is away must not hold the end up once for each."""
        began = time.monotonic()
        self._call(work, self._patience_s)
        if time.monotonic() - began > SLOW_S:
            self._patience_s = IMPATIENT_S

    def _call(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        future = asyncio.run_coroutine_threadsafe(work, engine_loop())
        try:
            future.result(timeout=timeout_s)
        except Exception as error:
            late = not future.done()
            future.cancel()
            log.warning("shutdown: %s", f"not done in {timeout_s:g} s" if late else f"{type(error).__name__}: {error}")


async def _end_with_engine(host: hosting.Host, worker: Any) -> None:
    """A worker without an engine must not linger: tell Celery to stop, and insist."""
    await host.supervisor.failed.wait()
    await host.leave()
    worker.exitcode = FAILED  # which Celery leaves at 0 when it is told to terminate
    state.should_terminate = FAILED
    await asyncio.sleep(5.0)
    _end_now(FAILED, host)


def _end_now(code: int, host: hosting.Host | None) -> None:
    """End this process and the engine's. A normal exit would wait for an engine that is still loading."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    if host is not None:
        psutil.wait_procs(children, timeout=1.0)  # who write into the memory
        host.remove_memory()
    logging.shutdown()
    os._exit(code)


def _unexpected(error: Exception) -> bool:
    from app.redis import RedisUnavailable, UnsafeBroker

    expected = (settings.SettingsError, RedisUnavailable, UnsafeBroker, MisconfiguredWorker)
    return not isinstance(error, expected)


def install(app: Celery) -> None:
    """Add the step to the worker's blueprint."""
    app.steps["worker"].add(EngineStep)
