"""One component of an `up`: started, watched until it is ready, started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from app.launch import sessions, shared_memory
from app.launch.errors import StartFailed
from app.launch.process import Process, ProcessSpec, describe
from app.launch.readiness import POLL_S
from app.launch.shared_memory import Ledger
from app.launch.state import ComponentState, Phase

log = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
MAX_FAILURES = 5
#: A component that was ready for so long counts as mended: its earlier failures are forgotten.
STABLE_S = 60.0

#: Whether the process with this pid is ready.
Probe = Callable[[int], Awaitable[bool]]


class Component:
    """A process and its story. `buried` is called after each death, before anything is started again.

    `tensors` is the `tensors.directory` of the settings that it runs with.
    """

    def __init__(
        self,
        kind: str,
        spec: ProcessSpec,
        probe: Probe,
        changed: Callable[[], None],
        buried: Callable[[], Awaitable[None]] | None = None,
        *,
        tensors: Path = shared_memory.DIRECTORY,
    ) -> None:
        self.process = Process(spec)
        self.state = ComponentState(name=spec.name, kind=kind, since=time.time(), log=spec.log)
        self.ready_once = asyncio.Event()
        self._ledger = Ledger()
        self._probe = probe
        self._changed = changed
        self._buried = buried
        self._tensors = tensors
        self._ready_since = 0.0

    @property
    def name(self) -> str:
        return self.state.name

    async def keep(self) -> None:
        """Run until cancelled, which leaves the process alone, or until it has failed too often.

        Raises StartFailed when the process ends before it was ever ready.
        """
        failures = 0
        while True:
            code = await self._live()
            how = describe(code)
            await self._bury()
            if not self.ready_once.is_set():
                self.enter(Phase.FAILED, how)
                raise StartFailed(self.name, f"{how} before it was ready")
            stable = self._ready_since and time.monotonic() - self._ready_since >= STABLE_S
            failures = 1 if stable else failures + 1
            if failures > MAX_FAILURES:
                self.enter(Phase.FAILED, f"{how}; given up after {MAX_FAILURES} starts in a row")
                return
            delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (failures - 1))
            self.state.restarts += 1
            self.enter(Phase.RESTARTING, f"{how}; again in {delay:.0f} s")
            await asyncio.sleep(delay)

    def enter(self, phase: Phase, detail: str = "") -> None:
        log.log(
            logging.WARNING if phase in (Phase.RESTARTING, Phase.FAILED) else logging.INFO,
            "%s: %s %s",
            self.name,
            phase,
            detail,
        )
        self.state.phase, self.state.detail, self.state.since = phase, detail, time.time()
        self._changed()

    async def _live(self) -> int:
        """One life of the process, from its start to its exit code."""
        self._ready_since = 0.0
        await self.process.start()
        self.state.pid, self.state.ticks = self.process.pid, self.process.ticks
        self.enter(Phase.STARTING)
        size = self.state.log.stat().st_size
        ended = asyncio.create_task(self.process.wait())
        try:
            while not ended.done():
                ready = self.state.phase is Phase.READY
                await asyncio.wait({ended}, timeout=None if ready else POLL_S)
                if not ready and not ended.done():
                    await self._look(size)
            return ended.result()
        finally:
            ended.cancel()

    async def _look(self, log_size: int) -> None:
        if await self._probe(self.process.pid):
            await self.note_shared_memory()
            self._ready_since = time.monotonic()
            self.ready_once.set()
            self.enter(Phase.READY)
        elif self.state.phase is Phase.STARTING and self.state.log.stat().st_size > log_size:
            self.enter(Phase.LOADING)

    async def _bury(self) -> None:
        """Its entry first, so that others notice at once; then the descendants that outlived it."""
        if self._buried is not None:
            await self._buried()
        await self.clear()

    async def clear(self) -> list[int]:
        """End what is left of the process, its descendants and their shared memory. Answers pids that did not end."""
        if self.process.running:
            await self.note_shared_memory()
        if left := await self.process.kill():
            log.error("%s: processes %s do not end", self.name, left)
        if removed := await asyncio.to_thread(self._ledger.remove):
            log.info("%s left in shared memory, now removed: %s", self.name, ", ".join(removed))
        await asyncio.to_thread(shared_memory.sweep, self._tensors)
        self._ledger.names.clear()
        self.state.shared_memory = []
        return left

    async def note_shared_memory(self) -> None:
        """Remember what its processes use now, for when they can no longer be asked."""
        await asyncio.to_thread(lambda: self._ledger.note(sessions.members(self.process.pid)))
        self.state.shared_memory = sorted(self._ledger.names)
