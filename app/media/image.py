"""Refusing what is not a picture before a worker sees it."""

from __future__ import annotations

import threading
import warnings

from PIL import Image

from app.errors.media import MediaRefused
from app.media import image_parts
from app.media.image_parts import ImageHeader

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
TOO_MANY_PARTS = "the image has too many parts"

#: `warnings.catch_warnings` swaps the process's filters, which two threads must not do at once.
_filters = threading.Lock()


def check_image(data: bytes, max_pixels: int, param: str, *, formats: tuple[str, ...] = FORMATS) -> tuple[int, int]:
    """(width, height) from the header; nothing is decoded. Raises MediaRefused."""
    header = ImageHeader(data)
    try:
        width, height = _size(data, header, formats)
    except Image.DecompressionBombError:
        raise MediaRefused(_too_large(max_pixels), param=param) from None
    except image_parts.TooManyParts:
        raise MediaRefused(TOO_MANY_PARTS, param=param) from None
    except Exception:
        # Whatever a broken header makes Pillow raise. Its own message holds an object's address; it stays here.
        if not header.spent:
            raise MediaRefused(f"not an image in a known format ({', '.join(formats)})", param=param) from None
    if header.spent:
        raise MediaRefused(TOO_MANY_PARTS, param=param)
    if width * height > max_pixels:
        raise MediaRefused(_too_large(max_pixels), param=param)
    if width < 1 or height < 1:
        raise MediaRefused("the image has no pixels", param=param)
    return width, height


def _size(data: bytes, header: ImageHeader, formats: tuple[str, ...]) -> tuple[int, int]:
    with _filters, warnings.catch_warnings():
        # Pillow warns of large images and of broken metadata: both are answered here.
        warnings.simplefilter("ignore")
        image_parts.check(data)
        with Image.open(header, formats=formats) as image:
            return image.size


def _too_large(max_pixels: int) -> str:
    return f"the image has more pixels than media.max_image_pixels allows ({max_pixels})"
