"""`data:` URLs (RFC 2397), base64 only, and vLLM's form for a video given as frames."""

from __future__ import annotations

import binascii
from collections.abc import Iterator

import pybase64

from app.errors.media import MediaRefused, MediaTooLarge
from app.media.media_type import check_type
from app.messages.media import Modality

#: A video as its frames: `data:video/jpeg;base64,` and a JPEG after the other, each in base64, with commas between.
FRAMES = "video/jpeg"
_EXAMPLES: dict[Modality, str] = {
    "image": "data:image/png;base64,...",
    "video": "data:video/mp4;base64,...",
    "audio": "data:audio/wav;base64,...",
}
_SCHEME = "data:"
#: Longest head, which is the media type and its parameters.
_HEAD = 1000


def is_data(url: str) -> bool:
    return url[: len(_SCHEME)].lower() == _SCHEME


def decode(
    url: str, modality: Modality, max_bytes: int, max_frames: int, param: str, payload: memoryview | None = None
) -> tuple[bytes, str]:
    """The bytes in a base64 URL that `is_data`, and their media type where they do not tell it themselves, or else "".

    `payload` stands for what follows the comma, where that lies elsewhere.
    Of a video given as frames (media type `video/jpeg`) the bytes are the ASCII text after the comma: every frame's
    base64 is sound, what is in it nobody has looked at. Raises MediaRefused, which names `param` and echoes nothing.
    """
    comma = url.find(",", 0, _HEAD)
    example = _EXAMPLES[modality]
    if comma < 0:
        raise MediaRefused(f"the data: URL has no comma after its media type ({example})", param=param)
    kind, *attributes = (part.strip() for part in url[len(_SCHEME) : comma].lower().split(";"))
    if "base64" not in attributes:
        raise MediaRefused(f"the data: URL must be base64 ({example})", param=param)
    check_type(kind, modality, param)
    if payload is None:
        payload = memoryview(url[comma + 1 :].encode(errors="replace"))
    if not payload:
        raise MediaRefused("the data: URL is empty", param=param)
    if kind == FRAMES:
        return _frames(bytes(payload), max_bytes, max_frames, param), FRAMES
    if len(payload) * 3 // 4 > max_bytes + 2:  # padding makes the estimate up to two bytes too large
        raise _too_large(max_bytes, param)
    data = _base64(payload, "the data: URL's base64 is not valid", param)
    if len(data) > max_bytes:
        raise _too_large(max_bytes, param)
    return data, ""


def _frames(payload: bytes, max_bytes: int, max_frames: int, param: str) -> bytes:
    """The payload, if what is in it is sound, and not too large."""
    estimate = len(payload) * 3 // 4 - 4 * payload.count(b",")
    if estimate > max_bytes + 2 or sum(len(frame) for frame in frames(payload, max_frames, param)) > max_bytes:
        raise _too_large(max_bytes, param)
    return payload


def frames(payload: bytes, max_frames: int, param: str) -> Iterator[bytes]:
    """The JPEG files of a video given as frames, one after the other.

    Raises MediaRefused for more than `max_frames`, for base64 that is not sound, and for an empty frame.
    """
    if payload.count(b",") >= max_frames:  # counted before it is split: an empty text takes 40 bytes, its comma one
        raise MediaRefused(f"more frames than media.max_video_frames allows ({max_frames})", param=param)
    for at, one in enumerate(payload.split(b",")):
        yield _base64(one, f"the base64 of frame {at} (from 0) is empty or not valid", param)


def _base64(text: bytes | memoryview, wrong: str, param: str) -> bytes:
    # Thirty times as fast as the standard library, which keeps everything else of the process waiting meanwhile.
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaRefused(wrong, param=param) from None
    if not data:
        raise MediaRefused(wrong, param=param)
    return data


def _too_large(max_bytes: int, param: str) -> MediaTooLarge:
    return MediaTooLarge(f"larger than media.max_item_mb allows ({max_bytes / 1e6:g} MB)", param=param)
