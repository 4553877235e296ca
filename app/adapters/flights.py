"""One fetch of a source at a time, whichever of a host's processes asks.

Who comes while a source is being fetched waits for that, and gets what it found, as if it had come a little earlier.
The file that the fetch locks tells them: the version is written to it before the lock goes. By then its name is gone,
and those who come later ask the source again. A file that has both is of a process that died in between: what it says
is as old as that.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.adapters.limits import Limits
from app.adapters.locks import unlock, wait_for


class Flight:
    """`found` is the version that another one's fetch found; None for who has to fetch, and then to call `tell`."""

    def __init__(self, opened: int, found: str | None) -> None:
        self.found = found
        self._opened = opened

    def tell(self, version: str) -> None:
        os.pwrite(self._opened, version.encode(), 0)


@contextmanager
def flight(folder: Path, source: str, limits: Limits) -> Iterator[Flight]:
    """Raises AdapterUnreachable when the time is over."""
    path = folder / hashlib.sha256(source.encode()).hexdigest()
    while True:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            wait_for(opened, limits)
        except BaseException:
            os.close(opened)
            raise
        found = os.pread(opened, 128, 0).decode()
        if _is(path, opened):
            os.ftruncate(opened, 0)
            found = ""
            break
        if found:
            break
        unlock(opened)  # the fetch that was waited for failed, and the file that is there now is another one
    try:
        yield Flight(opened, found or None)
    finally:
        if not found:
            path.unlink(missing_ok=True)
        unlock(opened)


def _is(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(opened))
    except FileNotFoundError:
        return False
