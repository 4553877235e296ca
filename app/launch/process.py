"""One child process: its own session, its log file, and an end that takes its descendants along."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.launch import sessions, tether


@dataclass(frozen=True)
class ProcessSpec:
    """What to run. stdout and stderr are appended to `log`; `environment` is all of it."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


class Process:
    """A process of one ProcessSpec; `start` may be called again after it has ended."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._child: asyncio.subprocess.Process | None = None
        self.pid = 0
        self.ticks = 0

    async def start(self) -> None:
        """Start, in a session of its own. It gets SIGTERM when this process dies."""
        tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self.spec.argv]
        with self._open_log() as log:
            self._child = await asyncio.create_subprocess_exec(
                *tethered,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.spec.environment),
                start_new_session=True,
            )
        self.pid = self._child.pid
        self.ticks = sessions.start_ticks(self.pid) or 0

    def _open_log(self) -> IO[bytes]:
        return open(self.spec.log, "ab")

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def wait(self) -> int:
        """The exit code; minus the signal's number when one ended it."""
        if self._child is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return await self._child.wait()

    def signal(self, number: signal.Signals) -> None:
        """Signal the process itself, not its descendants."""
        if self._child is not None and self.running:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)

    async def kill(self) -> list[int]:
        """End what is left of it and its descendants. Answers the pids that did not end."""
        if self._child is None:
            return []
        left = await sessions.kill(self.pid, self.ticks)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), sessions.KILL_WAIT_S)
        return left


def describe(code: int) -> str:
    """`exited with code 1`, or the name of the signal that ended the process."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}"


def tail(log: Path, lines: int, limit: int = 16384) -> list[str]:
    """The last lines of a log that are not blank."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [_printable(line) for line in text.splitlines() if line.strip()][-lines:]


_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in _ESCAPE.sub("", line)).rstrip()
