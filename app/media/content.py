"""What every medium has to pass, wherever it came from: what its bytes say that it is."""

from __future__ import annotations

from app.errors.media import MediaRefused
from app.media.audio import check_audio
from app.media.image import check_image
from app.media.video import check_video
from app.messages.media import Modality
from app.settings_media import MediaSettings


def check(data: bytes, modality: Modality, media_type: str, limits: MediaSettings, param: str) -> None:
    """Look at headers; nothing is decoded, but it may read all of it: call it in a thread. Raises MediaRefused.

    `media_type` is that of MediaRef.
    """
    if not data:
        raise MediaRefused(f"the {modality} is empty", param=param)
    if modality == "image":
        check_image(data, limits.max_image_pixels, param)
    elif modality == "video":
        check_video(data, media_type, limits, param)
    else:
        check_audio(data, limits, param)
