"""This process's NIXL agent, on a thread of its own.

NIXL's calls may copy for milliseconds inside themselves (on one host by process_vm_readv), so one thread makes them
all, and looks how the transfers go.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from app.errors.tensors import PeerGone, TensorError
from app.messages.tensors import Descriptor
from app.tensors import devices, nixl_progress
from app.tensors.nixl_reads import BACKEND, Broken, Reads, Region

log = logging.getLogger(__name__)
T = TypeVar("T")

_START_S = 60.0
_STOP_S = 10.0


class NixlAgent:
    """Registers this process's memory and reads that of others.

    `host` is the address that others reach it at: no other device is used where that can be told (see `devices`),
    unless UCX_NET_DEVICES says so. `timeout_s` limits every wait for NIXL. Everything raises TensorError once the agent
    is closed, or its thread has failed.
    """

    def __init__(self, host: str, progress_delay_us: int, timeout_s: float) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._host = host
        self._delay_us = progress_delay_us
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._destroyed = True
        self._why: TensorError | None = None
        self._ready = promise()
        self._thread = threading.Thread(target=self._serve, name="nixl", daemon=True)

    async def start(self) -> None:
        """Load NIXL and make the agent: a second or two. Raises TensorError."""
        self._thread.start()
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.wrap_future(self._ready)
        except TimeoutError:
            raise TensorError(f"NIXL did not start within {_START_S:g} s") from None

    async def close(self) -> None:
        """End the reads in progress with TensorError and destroy the agent: nothing is written after that."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._jobs.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _STOP_S)
        if self._thread.is_alive():
            raise TensorError(f"NIXL did not end within {_STOP_S:g} s")
        if not self._destroyed:
            raise TensorError("NIXL's agent could not be destroyed")

    async def call(self, job: Callable[[Reads], T]) -> T:
        """Run something on the agent's thread. It runs to its end even when the caller is cancelled meanwhile, or gives
        up after `timeout_s`, which is a TensorError."""
        future = promise()
        self.submit(lambda reads: _settle(future, job, reads), lambda: _fail(future, self._reason()))
        result: T = await self.wait(future)
        return result

    async def wait(self, future: Future[T]) -> T:
        """What was promised by a job of the agent's thread."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise TensorError(f"NIXL did not answer within {self._timeout_s:g} s (tensors.timeout_s)") from None

    def submit(self, job: Callable[[Reads], None], otherwise: Callable[[], None]) -> None:
        """Queue a job for the agent's thread, in order; or run the other one at once when it takes none any more."""
        with self._lock:
            if not self._stopped:
                self._jobs.put(_Job(job, otherwise))
                return
        otherwise()

    async def read(self, source: Descriptor, length: int, into: Region, timeout_s: float) -> None:
        """Read the first `length` bytes of a buffer. PeerGone when its holder is dead, or silent for `timeout_s`.

        However this ends, cancelled or not, the transfer may still write to `into`, which is to be given back through
        `Reads.release`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self._read(source, length, into)
                except Broken as error:
                    if error.fresh:
                        raise
                    log.info("connecting to %s again: %s", source.agent, error)
                    await self._read(source, length, into)
        except TimeoutError:
            self.submit(lambda reads: reads.distrust(source.agent), lambda: None)
            raise PeerGone(f"{source.agent} did not send {source.name} within {timeout_s:.1f} s") from None

    async def _read(self, source: Descriptor, length: int, into: Region) -> None:
        done = promise()
        self.submit(lambda reads: reads.begin(source, length, into, done), lambda: _fail(done, self._reason()))
        await asyncio.wrap_future(done)

    def _serve(self) -> None:
        try:
            reads = self._open()
        except Exception as error:
            self._ready.set_exception(TensorError(f"NIXL cannot start: {error}"))
            self._refuse()
            return
        self._destroyed = False
        self._ready.set_result(None)
        try:
            self._work(reads)
        except Exception as error:
            log.critical("NIXL's thread failed: this process reads and publishes no tensors any more", exc_info=True)
            self._why = TensorError(f"NIXL failed in this process ({type(error).__name__}: {error})")
            self._refuse()
        try:
            reads.close(self._reason())
            self._destroyed = True
        except Exception:
            log.exception("NIXL's agent cannot be destroyed")

    def _work(self, reads: Reads) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=reads.next_look_s)
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                try:
                    job.run(reads)
                except BaseException:
                    job.refuse()
                    raise
                del job
            reads.poll()

    def _refuse(self) -> None:
        with self._lock:
            self._stopped = True
            self._jobs.put(None)
        while job := self._jobs.get():
            job.refuse()

    def _reason(self) -> TensorError:
        return self._why or TensorError("the tensor plane is closed")

    def _open(self) -> Reads:
        # NIXL's setup of its own logging silences failures in that of the whole program.
        report = logging.raiseExceptions
        try:
            nixl_progress.apply(self._delay_us)
            from nixl import _api
        finally:
            logging.raiseExceptions = report
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        agent = _api.nixl_agent(self.name, _api.nixl_agent_config(backends=[]))
        # Not by the environment: an engine of the same process, or a child, has GPU memory to move, and other devices.
        own = devices.of(self._host)
        agent.create_backend(BACKEND, {"engine_config": f"NET_DEVICES={own}"} if own else {})
        return Reads(agent)


@dataclass(frozen=True)
class _Job:
    run: Callable[[Reads], None]
    otherwise: Callable[[], None]

    def refuse(self) -> None:
        try:
            self.otherwise()
        except Exception:
            log.exception("a job for NIXL could not be refused")


def promise() -> Future[Any]:
    """A future that its waiter cannot cancel: what it stands for happens all the same."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: Future[Any], job: Callable[[Reads], Any], reads: Reads) -> None:
    try:
        future.set_result(job(reads))
    except Exception as error:
        future.set_exception(error)


def _fail(future: Future[Any], error: TensorError) -> None:
    if not future.done():
        future.set_exception(error)
