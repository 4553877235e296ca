"""Celery bootstep: the engine is up before the first task is taken, and down before the process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import psutil
from celery import Celery, bootsteps
from celery.worker import state

from app import settings
from workers import host as hosting
from workers.draining import turn_away
from workers.pool import engine_loop

log = logging.getLogger(__name__)

#: Exit code of a worker that could not start, or whose engine died (EX_SOFTWARE).
FAILED = 70

T = TypeVar("T")


class EngineStep(bootsteps.StartStopStep):
    """Runs between the pool, on whose loop the engine lives, and the consumer, which takes tasks."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **_: Any) -> None:
        self.host: hosting.Host | None = None

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
            _end_now(FAILED)
        hosting.install(self.host)
        asyncio.run_coroutine_threadsafe(_end_with_engine(self.host, worker), engine_loop())
        log.info("worker %s: engine up in %.1f s", worker.hostname, time.monotonic() - started)

    def close(self, worker: Any) -> None:
        """First step of a shutdown: no new requests, while those in flight go on."""
        if self.host is not None:
            self._call(self.host.drain(), 5.0)

    def stop(self, worker: Any) -> None:
        """Warm shutdown: wait for the requests in flight, unless a second signal asks for more haste."""
        if self.host is None:
            return
        while len(self.host.jobs) and not state.should_terminate:
            self._call(turn_away(self.host), 5.0)
            time.sleep(0.1)
        if len(self.host.jobs):
            return self.terminate(worker)
        self._call(turn_away(self.host), 5.0)
        self._call(self.host.stop(), 10.0)
        self.host = None

    def terminate(self, worker: Any) -> None:
        """Cold shutdown: end the requests in flight with an error for their clients."""
        if self.host is None:
            return
        self._call(turn_away(self.host), 5.0)
        engine_loop().call_soon_threadsafe(self.host.cancel_all)
        until = time.monotonic() + 3.0
        while len(self.host.jobs) and time.monotonic() < until:
            time.sleep(0.05)
        self._call(self.host.stop(), 10.0)
        self.host = None

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
                _end_now(0)
            if time.monotonic() > until:
                raise TimeoutError(f"the engine was not up after {timeout_s:.0f} s (engine.start_timeout_s)")

    def _call(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, engine_loop()).result(timeout=timeout_s)
        except Exception as error:
            log.warning("shutdown: %s: %s", type(error).__name__, error)


async def _end_with_engine(host: hosting.Host, worker: Any) -> None:
    """A worker without an engine must not linger: tell Celery to stop, and insist."""
    await host.failed.wait()
    await host.leave()
    worker.exitcode = FAILED  # which Celery leaves at 0 when it is told to terminate
    state.should_terminate = FAILED
    await asyncio.sleep(5.0)
    _end_now(FAILED)


def _end_now(code: int) -> None:
    """End this process and the engine's. A normal exit would wait for an engine that is still loading."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    logging.shutdown()
    os._exit(code)


def _unexpected(error: Exception) -> bool:
    from app.redis import RedisUnavailable, UnsafeBroker

    expected = (settings.SettingsError, RedisUnavailable, UnsafeBroker, hosting.MisconfiguredWorker)
    return not isinstance(error, expected)


def install(app: Celery) -> None:
    """Add the step to the worker's blueprint."""
    app.steps["worker"].add(EngineStep)
