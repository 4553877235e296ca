"""`data:` URLs (RFC 2397), base64 only, and vLLM's form for a video given as frames."""

from __future__ import annotations

import base64
import binascii

from app.errors import MediaRefused
from app.messages import Modality

#: A video as its frames: `data:video/jpeg;base64,` and a JPEG after the other, each in base64, with commas between.
FRAMES = "video/jpeg"
_EXAMPLES: dict[Modality, str] = {"image": "data:image/png;base64,...", "video": "data:video/mp4;base64,..."}


def decode(url: str, modality: Modality, max_bytes: int, param: str) -> tuple[bytes, str]:
    """The bytes in a base64 `data:` URL, and their media type where they do not tell it themselves, otherwise "".

    Of a video given as frames (media type `video/jpeg`) the bytes are the ASCII text after the comma: every frame's
    base64 is sound, what is in it nobody has looked at. Raises MediaRefused, which names `param` and echoes nothing.
    """
    head, comma, payload = url.partition(",")
    scheme, _, media_type = head.partition(":")
    example = _EXAMPLES[modality]
    if scheme.lower() != "data" or not comma:
        raise MediaRefused(f"the URL must be a data: URL ({example})", param=param)
    kind, *attributes = (part.strip() for part in media_type.lower().split(";"))
    if "base64" not in attributes:
        raise MediaRefused(f"the data: URL must be base64 ({example})", param=param)
    if not kind.startswith(f"{modality}/") and kind not in ("", "application/octet-stream"):
        raise MediaRefused(f"the data: URL must have {_an(modality)}/ media type", param=param)
    if not payload:
        raise MediaRefused("the data: URL is empty", param=param)
    # Padding makes the estimate up to two bytes too large, for each frame.
    if len(payload) * 3 // 4 > max_bytes + 2 + 4 * payload.count(","):
        raise _too_large(max_bytes, param)
    if kind == FRAMES:
        if sum(len(frame) for frame in frames(payload, param)) > max_bytes:
            raise _too_large(max_bytes, param)
        return payload.encode("ascii"), FRAMES
    data = _base64(payload, "the data: URL's base64 is not valid", param)
    if len(data) > max_bytes:
        raise _too_large(max_bytes, param)
    return data, ""


def frames(payload: str, param: str) -> list[bytes]:
    """The JPEG files of a video given as frames. Raises MediaRefused for base64 that is not sound, or an empty frame.

    All of them take three quarters of the text's memory, for as long as the caller keeps them.
    """
    return [
        _base64(one, f"the base64 of frame {at} (from 0) is empty or not valid", param)
        for at, one in enumerate(payload.split(","))
    ]


def _base64(text: str, wrong: str, param: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaRefused(wrong, param=param) from None
    if not data:
        raise MediaRefused(wrong, param=param)
    return data


def _an(modality: Modality) -> str:
    return "an image" if modality == "image" else f"a {modality}"


def _too_large(max_bytes: int, param: str) -> MediaRefused:
    return MediaRefused(f"larger than media.max_item_mb allows ({max_bytes / 1e6:g} MB)", param=param)
