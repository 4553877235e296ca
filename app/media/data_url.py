"""`data:` URLs (RFC 2397), base64 only."""

from __future__ import annotations

import base64
import binascii

from app.errors import MediaRefused


def decode(url: str, max_bytes: int, param: str) -> bytes:
    """The bytes in a `data:image/...;base64,...` URL. Raises MediaRefused, which names `param` and echoes nothing."""
    head, comma, payload = url.partition(",")
    scheme, _, media_type = head.partition(":")
    if scheme.lower() != "data" or not comma:
        raise MediaRefused("the URL must be a data: URL (data:image/png;base64,...)", param=param)
    kind, *attributes = media_type.lower().split(";")
    if "base64" not in (attribute.strip() for attribute in attributes):
        raise MediaRefused("the data: URL must be base64 (data:image/png;base64,...)", param=param)
    if not kind.startswith("image/") and kind not in ("", "application/octet-stream"):
        raise MediaRefused("the data: URL must have an image/ media type", param=param)
    # Padding makes the estimate up to two bytes too large.
    if len(payload) * 3 // 4 > max_bytes + 2:
        raise _too_large(max_bytes, param)
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise MediaRefused("the data: URL's base64 is not valid", param=param) from None
    if not data:
        raise MediaRefused("the data: URL is empty", param=param)
    if len(data) > max_bytes:
        raise _too_large(max_bytes, param)
    return data


def _too_large(max_bytes: int, param: str) -> MediaRefused:
    return MediaRefused(f"larger than media.max_item_mb allows ({max_bytes / 1e6:g} MB)", param=param)
