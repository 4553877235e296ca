"""Refusing what is not a video before a worker sees it."""

from __future__ import annotations

from app.errors.media import MediaRefused
from app.media import data_url
from app.media.image import check_image
from app.settings_media import MediaSettings

FORMATS = ("MP4", "MOV", "WebM", "MKV", "AVI")

#: Types of the first box of an MP4 or QuickTime file: `ftyp` since 2001, the others in older ones.
_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
#: EBML, which Matroska and WebM begin with.
_EBML = b"\x1a\x45\xdf\xa3"


def check_video(data: bytes, media_type: str, limits: MediaSettings, param: str) -> None:
    """Look at a file's first bytes, or at the header of every JPEG of a video given as frames; nothing is decoded.

    Raises MediaRefused. A file that passes may still be one that no worker can read.
    """
    if media_type == data_url.FRAMES:
        _check_frames(data, limits, param)
    elif not _is_video(data):
        raise MediaRefused(
            f"not a video in a known format ({', '.join(FORMATS)}; or frames, as data:video/jpeg;base64,...)",
            param=param,
        )


def _check_frames(payload: bytes, limits: MediaSettings, param: str) -> None:
    pixels = 0
    for at, frame in enumerate(data_url.frames(payload, limits.max_video_frames, param)):
        try:
            width, height = check_image(frame, limits.max_image_pixels, param, formats=("JPEG",))
            pixels += width * height
        except MediaRefused as refused:
            raise MediaRefused(f"frame {at} (from 0): {refused.message}", param=param) from None
    if pixels > limits.max_video_pixels:
        allowed = limits.max_video_pixels
        raise MediaRefused(f"the frames have more pixels than media.max_video_pixels allows ({allowed})", param=param)


def _is_video(data: bytes) -> bool:
    if data[:4] == _EBML or data[4:8] in _BOXES:
        return True
    return data[:4] == b"RIFF" and data[8:12] == b"AVI "
