"""The folder in shared memory that a process keeps its buffers in.

`<root>/trivet-<uid>/<label>-<pid>-<random>`, for the user alone. The process holds a lock in it; a folder whose lock
nobody holds was left by a process that died, and whoever comes next removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from app.settings import SettingsError

log = logging.getLogger(__name__)

LOCK = ".lock"
#: What the folder of a user's folders is called.
NAME = re.compile(r"trivet-\d+")
# A folder is made under a hidden name, and has its lock before it is seen.
_HIDDEN = "."
_UNLOCKED_S = 30.0


@dataclass
class Folder:
    """A process's folder. `lock` is the open file that keeps it."""

    path: Path
    lock: int

    def remove(self) -> None:
        """Delete the folder and all in it; a second call does nothing."""
        if self.lock < 0:
            return
        # Two threads may be at it when a process ends in a hurry.
        lock, self.lock = self.lock, -1
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(lock)


def make_folder(root: Path, label: str) -> Folder:
    """A folder of this process's own; folders of processes that died are removed first.

    Raises SettingsError when the root is missing or the user's part of it belongs to somebody else.
    """
    base = _base(root)
    try:
        base.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"tensors.directory={root}: cannot make {base}: {error.strerror}") from None
    if not _ours(base):
        raise SettingsError(f"tensors.directory={root}: {base} is not a folder of this user's alone (mode 0700)")
    sweep(root)
    safe = re.sub(r"[^A-Za-z0-9_@-]", "_", label)[:64]
    name = f"{safe}-{os.getpid()}-{secrets.token_hex(4)}"
    hidden = base / f"{_HIDDEN}{name}"
    hidden.mkdir(mode=0o700)
    lock = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # A sweep may look at the very moment whether it is held.
    fcntl.flock(lock, fcntl.LOCK_EX)
    return Folder(hidden.rename(base / name), lock)


def sweep(root: Path) -> list[str]:
    """Remove this user's folders whose processes died; answers their names."""
    base = _base(root)
    if not _ours(base):
        return []
    removed = [entry.name for entry in base.iterdir() if _remove_if_dead(entry)]
    if removed:
        log.info("removed shared memory that dead processes left in %s: %s", base, ", ".join(sorted(removed)))
    return sorted(removed)


def check_room(root: Path, wanted: int, setting: str) -> None:
    """Refuse to start where `wanted` bytes, asked for by `setting`, do not fit. Raises SettingsError.

    What dead processes left is removed first: it may be what fills the memory.
    """
    sweep(root)
    try:
        room = os.statvfs(root)
    except OSError as error:
        raise SettingsError(f"tensors.directory={root}: {error.strerror}") from None
    free = room.f_bavail * room.f_frsize
    if free < wanted:
        raise SettingsError(
            f"tensors.directory={root} has {_size(free)} free, and {setting} wants {_size(wanted)}: make it larger"
            f" (docker: --shm-size, compose: TENSORS_SIZE), lower {setting}, or set tensors.directory to another"
            " memory file system"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _base(root: Path) -> Path:
    return root / f"trivet-{os.geteuid()}"


def _ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _remove_if_dead(path: Path) -> bool:
    if not _ours(path):
        return False
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return _remove_if_old(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        # Its maker may be between making the lock and taking it.
        return _remove_if_old(path) if path.name.startswith(_HIDDEN) else _remove(path)
    finally:
        os.close(lock)


def _remove_if_old(path: Path) -> bool:
    try:
        age = time.time() - path.lstat().st_mtime
    except OSError:
        return False
    return age > _UNLOCKED_S and _remove(path)


def _remove(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()
