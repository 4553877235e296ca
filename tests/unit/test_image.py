"""app.media.image."""

import io
import struct
import warnings
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from app.errors.media import MediaRefused
from app.media import check_image, header_view, image, image_parts
from tests.pictures import encoded

LIMIT = 1000
PARAM = "messages[0].content[0].image_url"


def refusal(data: bytes, limit: int = LIMIT) -> str:
    with pytest.raises(MediaRefused) as caught:
        check_image(data, limit, PARAM)
    assert caught.value.param == PARAM and caught.value.status == 400
    return caught.value.message


MODES = {
    "PNG": ["1", "L", "LA", "I;16", "P", "RGB", "RGBA"],
    "JPEG": ["L", "RGB", "CMYK"],
    "WEBP": ["RGB", "RGBA"],
    "GIF": ["L", "P", "RGB"],
    "BMP": ["1", "L", "P", "RGB", "RGBA"],
    "TIFF": ["1", "L", "LA", "I;16", "I", "F", "P", "RGB", "RGBA", "CMYK"],
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_every_format_and_mode(kind: str, mode: str) -> None:
    assert check_image(encoded(mode, kind), LIMIT, PARAM) == (7, 5)


def test_an_animation_is_its_first_frame() -> None:
    out = io.BytesIO()
    frames = [Image.new("L", (7, 5), shade) for shade in (0, 100, 200)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert check_image(out.getvalue(), LIMIT, PARAM) == (7, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"not a picture at all",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.4",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n",
        b"\x89PNG\r\n\x1a\n",
        encoded()[:20],
        b"P6 1 1 255 abc",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_picture_of_a_known_format(data: bytes) -> None:
    said = refusal(data)
    assert "not an image in a known format (JPEG, PNG" in said
    assert "0x" not in said, "an object's address"


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize("side", [40, 10_000, 20_000, 60_000, 2**31 - 1])
def test_a_bomb_is_known_by_its_header(side: int) -> None:
    data = png_header(side, side) + b"\0\0\0\0IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert refusal(data) == "the image has more pixels than media.max_image_pixels allows (1000)"


def test_the_limit_is_the_last_size_that_is_taken() -> None:
    assert check_image(encoded(size=(50, 20)), 1000, PARAM) == (50, 20)
    refusal(encoded(size=(77, 13)), 1000)


PNG = encoded()
CHUNK = b"\0\0\0\0teSt" + struct.pack(">I", zlib.crc32(b"teSt"))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff\xfe\0\x02" * 20_000,
        b"\xff\xd8" + b"\xff" * 20_000,
    ],
    ids=["JPEG of comments", "JPEG of fill bytes"],
)
def test_a_header_without_an_end_is_left(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:

    class Counted(image_parts.ImageHeader):
        times = 0

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            self.times += bool(found)
            return found

    views: list[Counted] = []

    def view_of(data: bytes) -> Counted:
        views.append(Counted(data))
        return views[-1]

    monkeypatch.setattr(image, "ImageHeader", view_of)
    assert refusal(data) == "the image has too many parts"
    (view,) = views
    assert view.times <= header_view.MOST_READS


def test_a_header_of_a_thousand_parts_is_read() -> None:
    assert check_image(PNG[:33] + CHUNK * 1000 + PNG[33:], LIMIT, PARAM) == (7, 5)


def test_a_picture_without_pixels_is_none() -> None:
    refusal(b"GIF89a" + struct.pack("<HHBBB", 0, 5, 0, 0, 0) + b";")


SAMPLES = [encoded("RGB", kind) for kind in MODES]


@settings(max_examples=400)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(8, 300),
)
def test_whatever_is_wrong_with_it_the_answer_is_a_refusal(
    data: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    broken = bytearray(data)
    for at, value in changes:
        broken[at % len(broken)] = value
    try:
        check_image(bytes(broken[:length]), LIMIT, PARAM)
    except MediaRefused as refused:
        assert len(refused.message) < 200
