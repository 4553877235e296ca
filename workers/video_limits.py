"""Adapter to vLLM: how much of a video its loader would decode, known from the header before a frame is."""

from __future__ import annotations

from typing import Any

from app.errors.media import MediaRefused
from app.settings_media import MediaSettings

#: Frames a second. Cameras of phones reach so many; more are made to keep a decoder busy.
HIGHEST_RATE = 240


def bounded(loader: Any, data: bytes, limits: MediaSettings, param: str) -> Any:
    """vLLM's video loader as one that raises MediaRefused rather than decode too much of this file.

    The loader chooses the frames itself, by the model's rules, once it knows their number and rate. Raises ValueError
    for a file that cannot be opened.
    """
    pixels = _frame_pixels(data)
    kind: Any = type(loader)

    class Bounded(kind):
        @classmethod
        def compute_frames_index_to_sample(cls, source: Any, target: Any, **kwargs: Any) -> Any:
            _check_file(source, pixels, limits, param)
            chosen = super().compute_frames_index_to_sample(source=source, target=target, **kwargs)
            if len(chosen) * pixels > limits.max_video_pixels:
                raise MediaRefused(
                    "the frames that the model takes of the video have more pixels than media.max_video_pixels allows "
                    f"({limits.max_video_pixels})",
                    param=param,
                )
            return chosen

    return Bounded()


def _check_file(source: Any, pixels: int, limits: MediaSettings, param: str) -> None:
    """Whatever frames are chosen, the loader decodes all up to the last of them."""
    if source.duration > limits.max_video_seconds:
        allowed = limits.max_video_seconds
        raise MediaRefused(f"longer than media.max_video_seconds allows ({allowed:g} s)", param=param)
    if source.original_fps > HIGHEST_RATE:
        raise MediaRefused(f"the video has more than {HIGHEST_RATE} frames a second", param=param)
    if source.total_frames_num * pixels > limits.max_video_decoded_pixels:
        raise MediaRefused(
            "all frames of the video have more pixels than media.max_video_decoded_pixels allows "
            f"({limits.max_video_decoded_pixels})",
            param=param,
        )


def _frame_pixels(data: bytes) -> int:
    import cv2
    from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

    # Never `capture.release()`: OpenCV would let go of the Python object that it reads from without the GIL, and crash.
    capture = OpenCVVideoBackendMixin.open_video_capture(data)
    return int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)) * int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
