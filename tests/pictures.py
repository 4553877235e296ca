"""Pictures for tests."""

import base64
import io

from PIL import Image


def encoded(mode: str = "RGB", kind: str = "PNG", size: tuple[int, int] = (7, 5)) -> bytes:
    """A picture of that mode and format, not all of one colour."""
    image = Image.new("RGB", size)
    image.putpixel((1, 1), (200, 100, 50))
    if mode in ("I", "F", "I;16"):
        image = image.convert("L")
    out = io.BytesIO()
    image.convert(mode).save(out, kind)
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
