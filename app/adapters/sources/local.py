"""`file:///path` and absolute paths: folders below one configured root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from app.adapters.base import AdapterRefused, AdapterUnreachable
from app.adapters.intake import FILES, Intake, missing
from app.adapters.limits import CHUNK
from app.settings import SettingsError


class LocalSource:
    """Raises AdapterRefused for a path that is not below `root`, and SettingsError for a root that is no folder."""

    def __init__(self, source: str, root: str | None) -> None:
        if root is None:
            raise AdapterRefused("local sources are refused; adapters.allowed_root can allow a folder")
        self._root = Path(root).expanduser().resolve()
        if not self._root.is_dir():
            raise SettingsError(f"adapters.allowed_root: {root} is no folder")
        self._path = _path(source)
        if ".." in self._path.parts:
            raise AdapterRefused("the adapter's path has .. in it")

    def take(self, intake: Intake) -> None:
        with self._held(self._path) as folder:
            if not stat.S_ISDIR(os.fstat(folder).st_mode):
                raise AdapterRefused("the adapter's path is no folder")
            if (problem := missing(os.listdir(_of(folder)), "the folder")) is not None:
                raise problem
            for name in FILES:
                with self._held(Path(name), folder) as file:
                    if not stat.S_ISREG(os.fstat(file).st_mode):
                        raise AdapterRefused(f"{name} in the adapter's folder is no regular file")
                    intake.write(name, _read(file))

    @contextmanager
    def _held(self, path: Path, folder: int | None = None) -> Iterator[int]:
        """What the path leads to through whatever links, if that is below the root, whatever takes its name meanwhile.

        O_PATH opens nothing: it holds on to the file. That one is looked at, and that one is opened.
        """
        try:
            held = os.open(path, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            raise AdapterUnreachable(f"the adapter's path cannot be read: {os.strerror(error.errno or 0)}") from None
        try:
            if not Path(os.readlink(_of(held))).is_relative_to(self._root):
                raise AdapterRefused("the adapter's path leads out of adapters.allowed_root")
            yield held
        finally:
            os.close(held)


def _path(source: str) -> Path:
    if source.startswith("/"):
        return Path(source)
    authority, slash, path = source[len("file:") :].removeprefix("//").partition("/")
    if not source[len("file:") :].startswith("//") or not slash or authority.lower() not in ("", "localhost"):
        raise AdapterRefused("a file:// source is written as file:///path")
    if set(path) & set("?#\\"):
        raise AdapterRefused("a file:// source must not have ?, # or a backslash in it")
    found = unquote("/" + path)
    if "\0" in found:
        raise AdapterRefused("a file:// source must not have a null character in it")
    return Path(found)


def _of(held: int) -> str:
    return f"/proc/self/fd/{held}"


def _read(held: int) -> Iterator[bytes]:
    try:
        with open(_of(held), "rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except OSError as error:
        raise AdapterUnreachable(f"the adapter's file cannot be read: {os.strerror(error.errno or 0)}") from None
