"""What `tarfile` and `zipfile` read from: files that do not let a header make them read without a measure."""

from __future__ import annotations

from typing import IO

from app.adapters.base import AdapterRefused
from app.adapters.limits import CHUNK, Limits, Meter

#: Most bytes that are read at once. A directory of some thousand members fits; one of gigabytes does not.
MOST = CHUNK


class Bounded:
    """A file with no read of more than MOST bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if size > MOST:
            raise _too_long()
        data = self._file.read(size if size >= 0 else MOST + 1)
        if len(data) > MOST:
            raise _too_long()
        return data

    def seek(self, to: int, whence: int = 0) -> int:
        return self._file.seek(to, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True


class Tape:
    """A stream that goes forward alone, and whose every byte is counted, those that are skipped included."""

    def __init__(self, file: IO[bytes], limits: Limits) -> None:
        self._file = Bounded(file)
        self._meter = Meter(limits)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._meter.add(len(data))
        return data

    def seek(self, to: int) -> int:
        if to < self.tell():
            raise ValueError("a tape does not go back")
        while (ahead := to - self.tell()) and self.read(min(ahead, MOST)):
            pass
        return self.tell()

    def tell(self) -> int:
        return self._meter.total


def _too_long() -> AdapterRefused:
    return AdapterRefused(f"the archive has a header of more than {MOST} bytes")
