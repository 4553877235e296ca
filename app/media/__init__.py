"""Media: from a part of a request to bytes that the encoding worker can fetch under the name of their content."""

from app.media.data_url import decode
from app.media.identity import identify
from app.media.image import check_image
from app.media.store import MediaStore, RedisMediaStore

__all__ = ["MediaStore", "RedisMediaStore", "check_image", "decode", "identify"]
