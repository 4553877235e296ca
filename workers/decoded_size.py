"""What media take in memory once they are decoded, known from their headers before they are."""

from __future__ import annotations

import io

from app.media import FRAMES, check_image, data_url
from app.messages.media import MediaRef
from app.settings_media import MediaSettings

#: Bytes of a pixel (RGB), and of a sample (32-bit float).
PIXEL, SAMPLE = 3, 4


def decoded_size(ref: MediaRef, data: bytes, limits: MediaSettings) -> int:
    """Bytes, at most, of what `media_loading.load` makes of sound content. Reads headers: call it in a thread.

    How many frames of a video in a file the model takes is known only to its loader, so that it counts as large as a
    video may be, or with all of its frames. Raises MediaRefused.
    """
    if ref.media_type == FRAMES:
        frames = data_url.frames(data, limits.max_video_frames, ref.param)
        return PIXEL * sum(_pixels(frame, ref, limits) for frame in frames)
    if ref.modality == "image":
        return PIXEL * _pixels(data, ref, limits)
    if ref.modality == "video":
        return PIXEL * min(_video_pixels(data), limits.max_video_pixels)
    return min(_samples(data) * SAMPLE, int(limits.max_audio_decoded_mb * 1e6))


def _pixels(data: bytes, ref: MediaRef, limits: MediaSettings) -> int:
    width, height = check_image(data, limits.max_image_pixels, ref.param)
    return width * height


def _video_pixels(data: bytes) -> int:
    """0 for a file that cannot be opened: nothing of it will be decoded."""
    import cv2
    from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

    try:
        # Never `capture.release()`: see video_limits.
        capture = OpenCVVideoBackendMixin.open_video_capture(data)
    except ValueError:
        return 0
    sizes = (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_COUNT)
    width, height, frames = (max(0, int(capture.get(one))) for one in sizes)
    return width * height * frames


def _samples(data: bytes) -> int:
    """Of all channels; 0 for a file that cannot be opened."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return int(file.frames) * int(file.channels)
    except soundfile.LibsndfileError:
        return 0
