"""Pictures of too many parts are left before anything goes through them; all others are none of its business."""

import io
import struct
import zlib

import pytest
from PIL import Image, TiffTags
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from app.errors.media import MediaRefused
from app.media import check_image
from app.media.image_parts import MOST_TAG_BYTES, TooManyParts, check

STRIPS, LAYERS, LONG = 273, 37724, 4


def encoded(kind: str, **more: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(out, kind, **more)
    return out.getvalue()


PNG = encoded("PNG")
END = PNG.rindex(b"IEND") - 4


def chunks(number: int, name: bytes = b"teSt", body: bytes = b"") -> bytes:
    return (struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))) * number


@pytest.mark.parametrize("at", [33, END], ids=["before the pixels", "after them"])
def test_a_png_of_many_chunks(at: int) -> None:
    check(PNG[:at] + chunks(5000) + PNG[at:])
    with pytest.raises(TooManyParts):
        check(PNG[:at] + chunks(20_000) + PNG[at:])
    with pytest.raises(MediaRefused, match=r"^the image has too many parts$"):
        check_image(PNG[:at] + chunks(20_000) + PNG[at:], 10_000, "part")


def test_a_large_png_may_have_more() -> None:
    check(PNG[:END] + chunks(14_000, body=bytes(8192)) + PNG[END:])


@pytest.mark.parametrize("cut", [8, 20, 40, len(PNG) - 1])
def test_a_png_that_ends_too_soon_has_few(cut: int) -> None:
    check(PNG[:cut])


def tiff(strips: int, order: str = "<", big: bool = False) -> bytes:
    """A TIFF of 8 by 1 pixels, or a BigTIFF, which says that it has so many strips."""
    head = struct.pack(f"{order}HHHQ", 43, 8, 0, 16) if big else struct.pack(f"{order}HI", 42, 8)
    field = struct.Struct(f"{order}HH{'QQ' if big else 'II'}")
    fields = {256: (1, 8), 257: (1, 1), 258: (1, 8), 259: (1, 1), 262: (1, 1), STRIPS: (strips, 1000), 278: (1, 1)}
    packed = b"".join(field.pack(tag, LONG, *of) for tag, of in fields.items())
    count = struct.pack(f"{order}{'Q' if big else 'H'}", len(fields))
    mark = b"II" if order == "<" else b"MM"
    return (mark + head + count + packed).ljust(1000, b"\0") + bytes(4 * strips)


@pytest.mark.parametrize("form", [("<", False), (">", False), ("<", True)], ids=["Intel", "Motorola", "BigTIFF"])
def test_a_tiff_of_many_strips(form: tuple[str, bool]) -> None:
    few = tiff(MOST_TAG_BYTES // 4, *form)
    check(few)
    assert check_image(few, 10_000, "part") == (8, 1)
    with pytest.raises(TooManyParts):
        check(tiff(MOST_TAG_BYTES // 4 + 1, *form))


def test_what_a_tiff_has_of_bytes_is_never_gone_through() -> None:
    more = ImageFileDirectory_v2()
    more[LAYERS] = bytes(4 * MOST_TAG_BYTES)
    more.tagtype[LAYERS] = TiffTags.UNDEFINED
    check(encoded("TIFF", tiffinfo=more))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_usual_pictures_are_let_through(kind: str) -> None:
    check(encoded(kind))
