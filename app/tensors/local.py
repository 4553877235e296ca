"""Another process's buffer on the same host: its file, opened instead of read over the network.

Paths come from other processes. A file is only ever opened for reading, and only when it is a regular one of our own
user below the folder that all processes share; anything else counts as not visible, and NIXL is asked.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from app.errors.tensors import TensorIncompatible, TensorMissing
from app.messages.tensors import Descriptor
from app.tensors import segment
from app.tensors.segment import Header

Way = Literal["mapped", "copied"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_of(directory: Path) -> str:
    """Equal for processes that may see each other's files: the kernel's boot and the memory file system."""
    try:
        kernel = _BOOT_ID.read_text().strip()
    except OSError:
        kernel = platform.node()
    return f"{kernel}:{directory.stat().st_dev}"


def described(descriptor: Descriptor) -> Header:
    """The header that the descriptor promises; TensorIncompatible when it contradicts itself."""
    return Header(
        name=descriptor.name,
        nonce=descriptor.nonce,
        dtype=descriptor.dtype,
        shape=tuple(descriptor.shape),
        nbytes=descriptor.nbytes,
    )


def agree(found: Header, promised: Header) -> None:
    """TensorMissing when another buffer lies there by now, TensorIncompatible when this one is of another kind."""
    if found.nonce != promised.nonce:
        raise TensorMissing(f"{promised.name}: another buffer lies there by now")
    if found != promised:
        raise TensorIncompatible(
            f"{promised.name}: the descriptor says {promised.dtype}{list(promised.shape)}, and the buffer is"
            f" {found.name}, {found.dtype}{list(found.shape)}"
        )


def link(descriptor: Descriptor, promised: Header, root: Path, target: Path) -> Way | None:
    """Give the holder's file a second name, or copy it where that is impossible. None: not visible from here."""
    with _visible(descriptor, root) as file:
        if file is None:
            return None
        agree(segment.header_of(file), promised)
        try:
            # By way of the open file: what was checked, whatever its name means by now. Python follows the link only
            # when it is given a folder too.
            os.link(f"/proc/self/fd/{file}", target, src_dir_fd=file, follow_symlinks=True)
        except OSError:
            if os.fstat(file).st_nlink == 0:
                raise TensorMissing(f"{promised.name}: its holder took it away") from None
            _copy(file, target, promised.total)
            return "copied"
        return "mapped"


def payload(descriptor: Descriptor, promised: Header, root: Path) -> bytes | None:
    """The payload of the holder's file. None: not visible from here."""
    with _visible(descriptor, root) as file:
        if file is None:
            return None
        agree(segment.header_of(file), promised)
        return segment.payload_of(file, promised)


@contextmanager
def _visible(descriptor: Descriptor, root: Path) -> Iterator[int | None]:
    file = _open(Path(descriptor.path), root, descriptor.name)
    try:
        yield file if file is not None and _regular(file) else None
    finally:
        if file is not None:
            os.close(file)


def _open(path: Path, root: Path, name: str) -> int | None:
    if not path.is_absolute():
        return None
    try:
        folder = path.parent.resolve(strict=True)
        if not folder.is_relative_to(root.resolve(strict=True)):
            return None
    except (OSError, RuntimeError, ValueError):
        return None
    try:
        return os.open(folder / path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise TensorMissing(f"{name}: its holder took it away") from None
    except (OSError, ValueError):
        return None


def _regular(file: int) -> bool:
    status = os.fstat(file)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _copy(file: int, target: Path, total: int) -> None:
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while at < total:
            count = os.sendfile(made, file, at, total - at)
            if count == 0:
                raise TensorIncompatible(f"{target.name}: the holder's file ends before its payload does")
            at += count
    finally:
        os.close(made)
