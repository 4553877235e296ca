"""`file:` URLs: files under one configured folder, and no others."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes

from app.errors.media import MediaRefused, MediaTooLarge, MediaUnreachable, MediaUrlRefused
from app.media.url_policy import MAX_LENGTH
from app.settings import SettingsError

CHUNK = 1 << 20


class FileRoot:
    """The folder in `media_urls.allowed_local_media_path`; with None every `file:` URL is refused.

    Raises SettingsError if it is no folder.
    """

    def __init__(self, root: str | None) -> None:
        self._root: Path | None = None
        if root is not None:
            self._root = Path(root).expanduser().resolve()
            if not self._root.is_dir():
                raise SettingsError(f"media_urls.allowed_local_media_path: {root} is no folder")

    def check(self, url: str) -> Path:
        """The path that the URL names, if it may be read as far as can be told without looking. Raises
        MediaUrlRefused."""
        if self._root is None:
            raise MediaUrlRefused("file: URLs are refused; media_urls.allowed_local_media_path can allow a folder")
        if len(url) > MAX_LENGTH:
            raise MediaUrlRefused(f"the URL is longer than {MAX_LENGTH} characters")
        authority, slash, path = url[len("file:") :].removeprefix("//").partition("/")
        if not url[len("file:") :].startswith("//") or not slash or authority.lower() not in ("", "localhost"):
            raise MediaUrlRefused("a file: URL is written as file:///path")
        if not url.isprintable() or set(path) & set("?#\\"):
            raise MediaUrlRefused("the file: URL has a character that it must not have (?, #, a backslash, a control)")
        name = unquote_to_bytes(path)
        parts = Path("/" + os.fsdecode(name)).parts
        if b"\0" in name or ".." in parts or not Path(*parts).is_relative_to(self._root):
            raise self._outside()
        return Path(*parts)

    def read(self, url: str, max_bytes: int) -> bytes:
        """The file's bytes. Blocks. Raises a MediaRefused, which says nothing of what lies outside of the folder."""
        path = self.check(url)
        try:
            # O_PATH opens nothing: it holds on to the file that the path leads to, through whatever links. That one
            # is looked at, and that one is opened, whatever takes its name meanwhile.
            held = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            raise MediaUnreachable("the file: URL's file cannot be read") from None
        try:
            self._refuse_outside(held)
            with open(f"/proc/self/fd/{held}", "rb", buffering=0) as file:
                return _read(file.fileno(), max_bytes)
        except OSError:
            raise MediaUnreachable("the file: URL's file cannot be read") from None
        finally:
            os.close(held)

    def _refuse_outside(self, held: int) -> None:
        assert self._root is not None
        if not Path(os.readlink(f"/proc/self/fd/{held}")).is_relative_to(self._root):
            raise self._outside()
        if not stat.S_ISREG(os.fstat(held).st_mode):
            raise MediaRefused("the file: URL does not name a regular file")

    def _outside(self) -> MediaUrlRefused:
        return MediaUrlRefused("the file: URL leads out of media_urls.allowed_local_media_path")


def _read(descriptor: int, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    left = max_bytes + 1
    while left and (chunk := os.read(descriptor, min(left, CHUNK))):
        chunks.append(chunk)
        left -= len(chunk)
    if not left:
        raise MediaTooLarge(f"larger than media.max_item_mb allows ({max_bytes / 1e6:g} MB)")
    return b"".join(chunks)
