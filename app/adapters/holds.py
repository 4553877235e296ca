"""What this process uses of the host's adapters."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from app.adapters.locks import locked, unlock


class Holds:
    """The shared lock on each folder in use, and how often it was taken. For threads."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[int, int]] = {}
        self._mutex = threading.Lock()

    def held(self) -> list[Path]:
        with self._mutex:
            return [*self._held]

    def take(self, folder: Path) -> None:
        """Called under the cache's lock: nobody has an exclusive lock on the folder then."""
        with self._mutex:
            opened, times = self._held.get(folder, (None, 0))
            if opened is None:
                opened = locked(folder, shared=True)
                assert opened is not None, f"{folder} is being removed"
            self._held[folder] = opened, times + 1

    def release(self, folder: Path) -> None:
        """Raises KeyError for a folder that is not held."""
        with self._mutex:
            opened, times = self._held.pop(folder)
            if times > 1:
                self._held[folder] = opened, times - 1
            else:
                os.utime(opened)
                unlock(opened)


#: Of the process, as locks are.
HOLDS = Holds()
