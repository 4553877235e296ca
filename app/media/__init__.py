"""Media: from a part of a request to bytes that a worker can read, under the name of their content."""

from app.media.content import check
from app.media.data_url import FRAMES, decode, is_data
from app.media.identity import identify, processed
from app.media.image import check_image
from app.media.store import MediaHolder
from app.media.video import check_video

__all__ = [
    "FRAMES",
    "MediaHolder",
    "check",
    "check_image",
    "check_video",
    "decode",
    "identify",
    "is_data",
    "processed",
]
