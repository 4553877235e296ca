"""A file of which a parser may read a header, and no more."""

from __future__ import annotations

import io
from typing import Any

#: Real headers take tens of reads. Parsers in Python take a microsecond or more for each, and all threads wait.
MOST_READS = 10_000


class HeaderView(io.BytesIO):
    """The file, which ends for good after MOST_READS reads, and is `spent` then.

    What a parser made of a spent one is worth nothing. It is no error to read it: parsers in C cannot be told of any.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads = 0

    @property
    def spent(self) -> bool:
        return self._reads > MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        return b"" if self.spent else super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        self._reads += 1
        return 0 if self.spent else super().readinto(buffer)
