"""Pictures of so many parts that a parser would never end: Pillow goes through them in Python, and all threads wait."""

from __future__ import annotations

import struct

from PIL.TiffImagePlugin import ImageFileDirectory_v2
from PIL.TiffTags import ASCII, BYTE, UNDEFINED

from app.media.header_view import MOST_READS, HeaderView

PNG = b"\x89PNG\r\n\x1a\n"
TIFF = (b"II", b"MM")
#: Usual chunks of pixels are larger.
BYTES_A_CHUNK = 4096
#: Of a TIFF tag's numbers: enough for the strips of 250,000 rows.
MOST_TAG_BYTES = 1 << 20
#: Types that stay as they are.
BYTES = (BYTE, ASCII, UNDEFINED)


class TooManyParts(Exception):
    pass


def check(data: bytes) -> None:
    """Raise TooManyParts. The file need not be a picture; what is broken raises whatever Pillow does."""
    if data.startswith(PNG):
        many = _has_chunks(data, MOST_READS + len(data) // BYTES_A_CHUNK)
    else:
        many = data.startswith(TIFF) and _has_long_tags(data)
    if many:
        raise TooManyParts


def _has_chunks(data: bytes, most: int) -> bool:
    """A PNG's are read to the end, for what may come after the pixels."""
    at, number, length = len(PNG), 0, struct.Struct(">I")
    while at + 12 <= len(data) and number <= most:
        at += 12 + length.unpack_from(data, at)[0]
        number += 1
    return number > most


def _has_long_tags(data: bytes) -> bool:
    """As TiffImageFile begins: numbers are made of a tag's bytes when it is looked at, which it is soon after."""
    with HeaderView(data) as file:
        head = file.read(8)
        if head[2:3] == b"\x2b":
            head += file.read(8)
        directory = ImageFileDirectory_v2(head)
        file.seek(directory.next)
        directory.load(file)
    tags = directory._tagdata.items()
    return any(len(raw) > MOST_TAG_BYTES and directory.tagtype[tag] not in BYTES for tag, raw in tags)
