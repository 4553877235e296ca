"""Locks between the processes of a host: flock, which the kernel lets go when its holder dies.

A lock belongs to the open file, and a forked child has that too: so what is locked is unlocked, and not merely closed.
Folders can be locked like files, on a local file system.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.adapters.limits import Limits

#: Between two looks at a lock that another one has.
POLL_S = 0.02


def locked(path: Path, *, shared: bool = False) -> int | None:
    """A descriptor that holds the lock on a file or folder that exists; None if another one has it."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if try_lock(opened, shared=shared):
        return opened
    os.close(opened)
    return None


def try_lock(opened: int, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(opened, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(opened: int) -> None:
    """Let go, and close."""
    fcntl.flock(opened, fcntl.LOCK_UN)
    os.close(opened)


def wait_for(opened: int, limits: Limits) -> None:
    """Lock what is open. Raises AdapterUnreachable when the time is over."""
    while not try_lock(opened):
        limits.check()
        time.sleep(POLL_S)


@contextmanager
def lock(path: Path, limits: Limits) -> Iterator[None]:
    """Hold the lock on a file, which is made if it is not there. Raises AdapterUnreachable when the time is over."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        wait_for(opened, limits)
    except BaseException:
        os.close(opened)
        raise
    try:
        yield
    finally:
        unlock(opened)
