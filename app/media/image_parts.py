"""Pictures of so many parts that a parser would never end: Pillow goes through them in Python, and all threads wait.

EXIF and Photoshop's resources are such parts, and a TIFF is made of nothing else; 256 KB of them take 0.1 s.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from PIL.TiffImagePlugin import ImageFileDirectory_v2
from PIL.TiffTags import ASCII, BYTE, TAGS_V2_GROUPS, UNDEFINED

from app.media.header_view import MOST_READS, HeaderView

PNG = b"\x89PNG\r\n\x1a\n"
RIFF = b"RIFF"
TIFF = (b"II", b"MM")
#: Usual chunks of pixels are larger.
BYTES_A_CHUNK = 4096
#: Of EXIF, of Photoshop's resources, or of a TIFF's numbers. A camera's EXIF has 64 KB at most.
MOST_METADATA = 1 << 18
#: What a JPEG's segments of them begin with.
METADATA = (b"Exif\0\0", b"Photoshop 3.0\0")
#: Tags of a TIFF with a number for each strip or tile, and most bytes of each: enough for 250,000 rows.
STRIPS = (273, 279, 324, 325)
MOST_STRIPS = 1 << 20
#: Types that stay as they are.
BYTES = (BYTE, ASCII, UNDEFINED)


class TooManyParts(Exception):
    pass


class ImageHeader(HeaderView):
    """Is spent, too, when too much of a JPEG's metadata was read, which is joined and gone through then."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._metadata = 0

    @property
    def spent(self) -> bool:
        return super().spent or self._metadata > MOST_METADATA

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        if found.startswith(METADATA):
            self._metadata += len(found)
        return b"" if self.spent else found


def check(data: bytes) -> None:
    """Raise TooManyParts. The file need not be a picture; what is broken raises whatever Pillow does."""
    most = MOST_READS + len(data) // BYTES_A_CHUNK
    if data.startswith(PNG):
        _check_chunks(_png_chunks(data), b"eXIf", most)
    elif data.startswith(RIFF):
        _check_chunks(_riff_chunks(data), b"EXIF", most)
    elif data.startswith(TIFF):
        _check_directories(data)


def _check_chunks(chunks: Iterator[tuple[bytes, int]], exif: bytes, most: int) -> None:
    for number, (name, size) in enumerate(chunks):
        if number > most or (name == exif and size > MOST_METADATA):
            raise TooManyParts


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Names and sizes, up to IEND, where Pillow stops; those after the pixels are read, too."""
    at, head, name = len(PNG), struct.Struct(">I4s"), b""
    while at + head.size <= len(data) and name != b"IEND":
        size, name = head.unpack_from(data, at)
        yield name, size
        at += 12 + size


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    at, head = 12, struct.Struct("<4sI")
    while at + head.size <= len(data):
        name, size = head.unpack_from(data, at)
        yield name, size
        at += head.size + size + size % 2


def _check_directories(data: bytes) -> None:
    """As TiffImageFile begins: numbers are made of a tag's bytes when it is looked at, which it is soon after."""
    with HeaderView(data) as file:
        try:
            numbers = 0
            for directory in _directories(file):
                numbers += sum(_numbers(directory, tag, raw) for tag, raw in directory._tagdata.items())
                if numbers > MOST_METADATA:
                    raise TooManyParts
        except Exception:
            if file.spent:
                raise TooManyParts from None
            raise


def _numbers(directory: ImageFileDirectory_v2, tag: int, raw: bytes) -> int:
    if directory.tagtype[tag] in BYTES or (tag in STRIPS and len(raw) <= MOST_STRIPS):
        return 0
    return len(raw)


def _directories(file: HeaderView) -> Iterator[ImageFileDirectory_v2]:
    """The picture's, and those that it names."""
    head = file.read(8)
    if head[2:3] == b"\x2b":
        head += file.read(8)
    yield from _below(file, head, ImageFileDirectory_v2(head).next, None, deeper=2)


def _below(file: HeaderView, head: bytes, at: int, group: int | None, deeper: int) -> Iterator[ImageFileDirectory_v2]:
    """The directory there, and those of EXIF, GPS, and what EXIF names in turn."""
    directory = ImageFileDirectory_v2(head, group=group)
    file.seek(at)
    directory.load(file)
    yield directory
    for tag in TAGS_V2_GROUPS if deeper else ():
        if isinstance(place := directory.get(tag), int):  # anything else is passed over by Pillow, too
            yield from _below(file, head, place, tag, deeper - 1)
