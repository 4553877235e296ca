"""The host's copies of adapters, by content: one folder for all workers.

    versions/<version>/   the files of an adapter; whoever uses it has a shared lock on the folder
    staging/<random>/     what is being fetched, or thrown away, under an exclusive lock of the one who does it
    flights/<source>      see app.adapters.flights
    lock                  held while a folder comes, goes, or is taken hold of

A folder comes into `versions` whole, by renaming, and does not change there. Locks go with the process that has them:
what a dead one had in `staging` is known by its being unlocked, and is swept away by the next.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from app.adapters.base import AdapterCacheFull, AdapterTooLarge
from app.adapters.holds import HOLDS
from app.adapters.limits import Limits
from app.adapters.locks import lock, locked, unlock
from app.settings_adapters import AdapterSettings

log = logging.getLogger(__name__)


def directory(settings: AdapterSettings) -> Path:
    """Where the cache is: `adapters.cache_directory`, or `trivet/adapters` in the user's cache directory."""
    if settings.cache_directory is not None:
        return Path(settings.cache_directory).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivet" / "adapters"


class Cache:
    """The cache that the settings name, for one fetch with its limits. All methods block, at most as long as these."""

    def __init__(self, settings: AdapterSettings, limits: Limits) -> None:
        folder = directory(settings)
        self.flights = folder / "flights"
        self._versions, self._staging, self._lock_file = folder / "versions", folder / "staging", folder / "lock"
        self._max_bytes = int(settings.cache_gb * 1e9)
        self._limits = limits
        for one in (folder, self.flights, self._versions, self._staging):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)

    def hold(self, version: str) -> Path | None:
        """The folder of a version, which stays until this process releases it; None if it is not here."""
        folder = self._versions / version
        with self._lock():
            return self._held(folder) if folder.is_dir() else None

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty folder, gone at the end with all that is in it. What dead processes left of theirs goes, too."""
        with self._lock():
            self._sweep()
            folder, opened = self._new_staging()
        try:
            yield folder
        finally:
            _remove(folder, opened)

    def publish(self, fetched: Path, version: str, size: int) -> Path:
        """Take a folder in, and hold it. If its content is here already, that stays and is held.

        Raises AdapterTooLarge or AdapterCacheFull.
        """
        folder = self._versions / version
        evicted: list[tuple[Path, int]] = []
        with self._lock():
            if not folder.is_dir():
                evicted = self._make_room(size)
                for one in fetched.iterdir():
                    one.chmod(0o400)
                os.rename(fetched, folder)
            self._held(folder)
        for old, opened in evicted:
            _remove(old, opened)
        return folder

    def _held(self, folder: Path) -> Path:
        HOLDS.take(folder)
        os.utime(folder)
        return folder

    def _make_room(self, size: int) -> list[tuple[Path, int]]:
        """Move the least recently used versions that nobody holds away; where they are now, and their locks."""
        if size > self._max_bytes:
            raise AdapterTooLarge(f"larger than adapters.cache_gb allows ({self._max_bytes / 1e9:g} GB)")
        sizes = {one: _size(one) for one in sorted(self._versions.iterdir(), key=lambda one: one.stat().st_mtime_ns)}
        excess = sum(sizes.values()) + size - self._max_bytes
        chosen: list[tuple[Path, int]] = []
        for folder, freed in sizes.items():
            if excess <= 0:
                break
            if (opened := locked(folder)) is not None:
                chosen.append((folder, opened))
                excess -= freed
        if excess > 0:
            for _, opened in chosen:
                unlock(opened)
            raise AdapterCacheFull("the adapters that this host's workers use fill the cache (adapters.cache_gb)")
        return [(self._out(folder), opened) for folder, opened in chosen]

    def _out(self, folder: Path) -> Path:
        log.info("adapter %s leaves the cache: others need its room", folder.name)
        return folder.rename(tempfile.mkdtemp(dir=self._staging))

    def _new_staging(self) -> tuple[Path, int]:
        folder = Path(tempfile.mkdtemp(dir=self._staging))
        opened = locked(folder)
        assert opened is not None, "nobody looks for it without the cache's lock"
        return folder, opened

    def _sweep(self) -> None:
        for one in (*self._staging.iterdir(), *self.flights.iterdir()):
            with suppress(FileNotFoundError):  # its process ends with it just now
                if (opened := locked(one)) is not None:
                    _remove(one, opened)

    def _lock(self) -> AbstractContextManager[None]:
        return lock(self._lock_file, self._limits)


def _size(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.iterdir())


def _remove(path: Path, opened: int) -> None:
    """Remove what is locked, and let go of it."""
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        log.warning("%s stays, though nobody needs it: %s", path, error)
    finally:
        unlock(opened)
