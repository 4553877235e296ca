"""Pictures of too many parts are left before anything goes through them; all others are none of its business."""

import io
import struct
import zlib

import pytest
from PIL import Image, TiffTags
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from app.errors.media import MediaRefused
from app.media import check_image
from app.media.image_parts import METADATA, MOST_METADATA, MOST_STRIPS, TooManyParts, check

STRIPS, X_RESOLUTION, Y_RESOLUTION, LAYERS = 273, 282, 283, 37724
EXIF, GPS, INTEROP = 34665, 34853, 40965
LONG, RATIONAL = 4, 5


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


def test_a_webp_of_many_chunks() -> None:
    webp, chunk = encoded("WEBP"), b"JUNK" + bytes(4)
    check(webp + chunk * 5000)
    with pytest.raises(TooManyParts):
        check(webp + chunk * 20_000)


def test_what_comes_after_a_pngs_end_is_nothing() -> None:
    check(PNG + bytes(1_000_000))


def exif(kind: str, size: int) -> bytes:
    """A picture with so many bytes of EXIF, all numbers that nobody needs."""
    directory = struct.pack("<HHHII", 1, 282, 5, (size - 26) // 8, 26) + bytes(4)
    return encoded(kind, exif=(b"II*\0" + struct.pack("<I", 8) + directory).ljust(size, b"\1"))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_much_exif(kind: str) -> None:
    for size in (100, 65_000, MOST_METADATA - 8):
        assert check_image(exif(kind, size), 10_000, "part") == (40, 30)
    with pytest.raises(TooManyParts):
        check(exif(kind, MOST_METADATA + 10))


@pytest.mark.parametrize("head", METADATA, ids=["EXIF", "Photoshop"])
def test_a_jpeg_of_many_segments(head: bytes) -> None:
    mark = b"\xff\xe1" if head == METADATA[0] else b"\xff\xed"
    segment = mark + struct.pack(">H", 60_002) + head.ljust(60_000, b"\1")
    jpeg = encoded("JPEG")
    assert check_image(jpeg[:2] + segment * 4 + jpeg[2:], 10_000, "part") == (40, 30)
    with pytest.raises(MediaRefused, match=r"^the image has too many parts$"):
        check_image(jpeg[:2] + segment * 5 + jpeg[2:], 10_000, "part")


def test_a_jpeg_may_have_large_profiles() -> None:
    assert check_image(encoded("JPEG", icc_profile=bytes(2_000_000)), 10_000, "part") == (40, 30)


@pytest.mark.parametrize("cut", [8, 20, 40, len(PNG) - 1])
def test_a_png_that_ends_too_soon_has_few(cut: int) -> None:
    check(PNG[:cut])


#: Of a TIFF's fields: type, count, value.
Fields = dict[int, tuple[int, int, int]]


def tiff(more: Fields, order: str = "<", big: bool = False, after: bytes = b"") -> bytes:
    """A TIFF of 8 by 1 pixels, or a BigTIFF, with these fields; `after` is at 1000."""
    head = struct.pack(f"{order}HHHQ", 43, 8, 0, 16) if big else struct.pack(f"{order}HI", 42, 8)
    one = {256: 8, 257: 1, 258: 8, 259: 1, 262: 1, STRIPS: 1000, 278: 1}
    fields = {tag: (LONG, 1, value) for tag, value in one.items()} | more
    mark = b"II" if order == "<" else b"MM"
    return (mark + head + directory(fields, order, big)).ljust(1000, b"\0") + after.ljust(100, b"\0")


def directory(fields: Fields, order: str = "<", big: bool = False) -> bytes:
    field = struct.Struct(f"{order}HH{'QQ' if big else 'II'}")
    packed = b"".join(field.pack(tag, *of) for tag, of in sorted(fields.items()))
    return struct.pack(f"{order}{'Q' if big else 'H'}", len(fields)) + packed + bytes(8)


@pytest.mark.parametrize("form", [("<", False), (">", False), ("<", True)], ids=["Intel", "Motorola", "BigTIFF"])
def test_a_tiff_of_many_strips(form: tuple[str, bool]) -> None:
    most = MOST_STRIPS // 4
    few = tiff({STRIPS: (LONG, most, 1000)}, *form, after=bytes(MOST_STRIPS))
    assert check_image(few, 10_000, "part") == (8, 1)
    with pytest.raises(TooManyParts):
        check(tiff({STRIPS: (LONG, most + 1, 1000)}, *form, after=bytes(MOST_STRIPS + 4)))


def test_a_tiff_of_many_numbers() -> None:
    """All together: a limit of each would be none."""
    half = MOST_METADATA // 16
    after = bytes(MOST_METADATA)
    check(tiff({X_RESOLUTION: (RATIONAL, half, 1000)}, after=after))
    with pytest.raises(TooManyParts):
        check(tiff({X_RESOLUTION: (RATIONAL, half, 1000), Y_RESOLUTION: (RATIONAL, half + 1, 1000)}, after=after))


@pytest.mark.parametrize("through", [(EXIF,), (GPS,), (EXIF, INTEROP)], ids=str)
def test_what_a_tiff_names_is_of_it(through: tuple[int, ...]) -> None:
    for numbers, many in ((10, False), (MOST_METADATA // 8 + 1, True)):
        last = directory({X_RESOLUTION: (RATIONAL, numbers, 1200)})
        named = last if len(through) == 1 else directory({through[1]: (LONG, 1, 1100)}).ljust(100, b"\0") + last
        data = tiff({through[0]: (LONG, 1, 1000)}, after=named.ljust(200 + MOST_METADATA + 8, b"\0"))
        if many:
            with pytest.raises(TooManyParts):
                check(data)
        else:
            check(data)


def test_directories_that_name_each_other_have_an_end() -> None:
    check(tiff({EXIF: (LONG, 1, 8), GPS: (LONG, 1, 8), INTEROP: (LONG, 1, 8)}))


def test_a_directory_of_many_tags() -> None:
    tags = directory(dict.fromkeys(range(1000, 9000), (LONG, 2, 0)))
    with pytest.raises(TooManyParts):
        check(tiff({EXIF: (LONG, 1, 1000)}, after=tags))


def test_what_a_tiff_has_of_bytes_is_never_gone_through() -> None:
    more = ImageFileDirectory_v2()
    more[LAYERS] = bytes(4 * MOST_STRIPS)
    more.tagtype[LAYERS] = TiffTags.UNDEFINED
    check(encoded("TIFF", tiffinfo=more))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_usual_pictures_are_let_through(kind: str) -> None:
    check(encoded(kind))
