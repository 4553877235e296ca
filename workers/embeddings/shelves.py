"""Where an engine's embeddings lie: in its worker's folder, in a folder of the engine's own, or nowhere."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Protocol

from app.tensors import segment
from app.tensors.folder import Folder
from workers.embeddings.store import NEW, EmbeddingStore

log = logging.getLogger(__name__)

_SHELL_S = 10.0


class Shelf(Protocol):
    """The scheduler's view of stored embeddings. Nothing here raises for a file or folder that is not there."""

    #: Whether somebody may have reserved a file for an item that the engine has encoded before.
    reserved_elsewhere: bool

    def take(self, identifier: str) -> Path | None:
        """A file of the item that stays until it is given back, or None."""

    def give_back(self, identifier: str, path: Path) -> None: ...

    def reserved(self, identifier: str, total: int | None) -> Path | None:
        """Where the engine is to write the item, if it may; `total` bytes at most, None when that is not known."""

    def settle(self, identifier: str) -> bool:
        """The step that was to write the item has run: whether the item is there."""

    def close(self) -> None:
        """The engine ends."""


class NoShelf:
    """Keeps nothing."""

    reserved_elsewhere = False

    def take(self, identifier: str) -> Path | None:
        return None

    def give_back(self, identifier: str, path: Path) -> None:
        return None

    def reserved(self, identifier: str, total: int | None) -> Path | None:
        return None

    def settle(self, identifier: str) -> bool:
        return False

    def close(self) -> None:
        return None


class WorkerShelf:
    """The folder of a worker, whose process owns it: it reserves, commits and evicts at any time.

    A hard link keeps an evicted file's bytes for as long as a request needs them. `rank` tells the engines apart that
    share the folder.
    """

    reserved_elsewhere = True

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._links = directory / "held" / str(rank)
        self._number = count()
        shutil.rmtree(self._links, ignore_errors=True)
        self._links.mkdir(mode=0o700, parents=True)

    def take(self, identifier: str) -> Path | None:
        link = self._links / str(next(self._number))
        try:
            os.link(self._directory / segment.file_name(identifier), link)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("embedding %r cannot be held: %s", identifier, error)
            return None
        return link

    def give_back(self, identifier: str, path: Path) -> None:
        path.unlink(missing_ok=True)

    def reserved(self, identifier: str, total: int | None) -> Path | None:
        return self._directory / (segment.file_name(identifier) + NEW)

    def settle(self, identifier: str) -> bool:
        return (self._directory / segment.file_name(identifier)).exists()

    def close(self) -> None:
        shutil.rmtree(self._links, ignore_errors=True)
        with suppress(OSError):
            self._links.parent.rmdir()


class OwnShelf:
    """A store of the engine's own, for an engine without a worker process around it. The folder goes with it."""

    reserved_elsewhere = False

    def __init__(self, folder: Folder, capacity: int) -> None:
        self._folder = folder
        self._end = _removed_at_the_end(folder.path)
        self._store = EmbeddingStore(folder.path, capacity)
        self._reserved: set[str] = set()

    def take(self, identifier: str) -> Path | None:
        path = self._store.path(identifier)
        if path is not None:
            self._store.hold(identifier)
        return path

    def give_back(self, identifier: str, path: Path) -> None:
        self._store.release(identifier)

    def reserved(self, identifier: str, total: int | None) -> Path | None:
        path = self._store.reserve(identifier, total) if total is not None else None
        if path is not None:
            self._reserved.add(identifier)
        return path

    def settle(self, identifier: str) -> bool:
        if identifier not in self._reserved:
            return False
        self._reserved.discard(identifier)
        return self._store.commit(identifier) is not None

    def close(self) -> None:
        self._folder.remove()
        self._end.close()


def _removed_at_the_end(folder: Path) -> IO[bytes]:
    """A pipe; when its end is closed, or this process gone, the folder is removed.

    vLLM ends by killing its engine process and all that descends from it, so the shell at the other end must not.
    """
    shell = subprocess.Popen(
        ["/bin/sh", "-c", 'exec 3<&0; { read -r _ <&3; rm -rf -- "$1"; } &', "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    shell.wait(_SHELL_S)
    assert shell.stdin is not None
    return shell.stdin
