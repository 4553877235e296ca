"""Refusing what is not a picture before a worker sees it."""

from __future__ import annotations

import io
import warnings

from PIL import Image, UnidentifiedImageError

from app.errors import MediaRefused

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def check_image(data: bytes, max_pixels: int, param: str) -> tuple[int, int]:
    """(width, height) from the header; nothing is decoded. Raises MediaRefused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
    except Image.DecompressionBombError:
        raise MediaRefused(_too_large(max_pixels), param=param) from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        # Pillow's own message holds an object's address; it stays here.
        raise MediaRefused(f"not an image in a known format ({', '.join(FORMATS)})", param=param) from None
    if width * height > max_pixels:
        raise MediaRefused(_too_large(max_pixels), param=param)
    return width, height


def _too_large(max_pixels: int) -> str:
    return f"the image has more pixels than media.max_image_pixels allows ({max_pixels})"
