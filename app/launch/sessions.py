"""Processes, told apart by more than a number: a leader with its start time, and all that share its session.

Every component leads a session of its own. An engine's processes stay in it, also when their worker was killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
KILL_WAIT_S = 5.0
PR_SET_CHILD_SUBREAPER = 36
_ZOMBIE = "Z"


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid, a name for good. None: it is gone."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == _ZOMBIE else int(fields[19])


def alive(pid: int, ticks: int) -> bool:
    """Whether the process that had this pid and start time still runs."""
    return start_ticks(pid) == ticks


def members(session: int) -> list[int]:
    """Running processes of the session."""
    found = []
    for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        fields = _stat(pid)
        if fields is not None and fields[0] != _ZOMBIE and int(fields[3]) == session:
            found.append(pid)
    return found


def leftovers(leader: int, ticks: int) -> list[int]:
    """Running processes of a session whose leader had this start time.

    The kernel gives a pid to nobody while a session of that number has members: another process under the leader's
    number means that the session is empty.
    """
    now = start_ticks(leader)
    return members(leader) if now is None or now == ticks else []


async def kill(leader: int, ticks: int) -> list[int]:
    """SIGKILL the leader and all of its session, and wait for their end. Answers those that did not end in 5 s."""
    killed: set[int] = set()
    until = time.monotonic() + KILL_WAIT_S
    while left := leftovers(leader, ticks):
        for pid in left:
            killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return left
        await asyncio.sleep(0.05)
    _reap(killed - {leader})
    return []


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies: a first process of a container may never reap them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap(pids: set[int]) -> None:
    """Orphans become children of the supervisor where it is the subreaper, or a container's first process."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (field 3); the command before it may hold blanks and brackets."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
