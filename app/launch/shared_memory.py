"""Files in /dev/shm: which of them our processes made, and their removal once nobody uses them.

A killed engine leaves its segments behind. What else lies there belongs to others: a file is ours only if one of our
processes was seen to have it open or mapped, and it was not there before. The folders of embeddings and media
(app.tensors.folder) are none of this: the same file may be in several, and they have their own sweep.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from app.tensors import folder

DIRECTORY = Path("/dev/shm")
PROC = Path("/proc")


class Ledger:
    """Names of files that belong to the processes of one component."""

    def __init__(self) -> None:
        self._before = set(listing())
        self.names: set[str] = set()

    def note(self, pids: Iterable[int]) -> None:
        """Look what these processes use now."""
        now = listing()
        used = {inode for pid in pids for inode in used_by(pid)}
        self.names |= {name for name, inode in now.items() if inode in used} - self._before

    def remove(self) -> list[str]:
        """Delete those that are left; answers their names."""
        return remove_unused(self.names)


def remove_unused(names: set[str]) -> list[str]:
    """Delete those of these files that no process uses; answers their names."""
    left = {name: inode for name, inode in listing().items() if name in names}
    if not left:
        return []
    used = {inode for entry in PROC.iterdir() if entry.name.isdigit() for inode in used_by(int(entry.name))}
    unused = sorted(name for name, inode in left.items() if inode not in used)
    for name in unused:
        with suppress(OSError):
            (DIRECTORY / name).unlink()
    return unused


def sweep(root: Path) -> list[str]:
    """Remove the folders of embeddings and media that dead processes left below `root`; answers their names."""
    return folder.sweep(root)


def listing() -> dict[str, int]:
    """Name -> inode of the files there, those in folders (`folder/file`) other than `folder.NAME` included."""
    found: dict[str, int] = {}
    for where, folders, files in os.walk(DIRECTORY):
        folders[:] = [name for name in folders if not folder.NAME.fullmatch(name)]
        for name in files:
            path = Path(where) / name
            with suppress(OSError):
                found[str(path.relative_to(DIRECTORY))] = path.lstat().st_ino
    return found


def used_by(pid: int) -> set[int]:
    """Inodes of files there that the process has mapped or open; empty for a process that we may not look at.

    Not names: the C library makes a semaphore under another name than the one that it gets.
    """
    try:
        device = DIRECTORY.stat().st_dev
    except OSError:
        return set()
    inodes: set[int] = set()
    with suppress(OSError):
        written = f"{os.major(device):02x}:{os.minor(device):02x}"
        for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
            _, _, _, at, inode, *_ = line.split(maxsplit=5)
            if at == written:
                inodes.add(int(inode))
    with suppress(OSError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                status = entry.stat()
                if status.st_dev == device:
                    inodes.add(status.st_ino)
    return inodes
