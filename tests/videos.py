"""Videos for tests."""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from tests.pictures import data_url

#: File ending and codec of what OpenCV writes here.
CODECS = {".mp4": "mp4v", ".avi": "MJPG", ".mkv": "MJPG", ".webm": "VP90"}


def frames(seed: int = 0, number: int = 6, size: tuple[int, int] = (64, 48)) -> list[np.ndarray]:
    """RGB frames of one colour with a block of noise: different seeds give different videos."""
    width, height = size
    random = np.random.RandomState(seed)
    shown = []
    for at in range(number):
        frame = np.full((height, width, 3), (at * 40 + seed * 30) % 256, dtype=np.uint8)
        frame[: height // 2, : width // 2] = (random.rand(height // 2, width // 2, 3) * 255).astype(np.uint8)
        shown.append(frame)
    return shown


def file(
    seed: int = 0, number: int = 12, size: tuple[int, int] = (64, 48), ending: str = ".mp4", rate: int = 8
) -> bytes:
    """A video file of `rate` frames a second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video{ending}"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*CODECS[ending]), rate, size)
        assert writer.isOpened(), f"OpenCV cannot write {ending} here"
        for frame in frames(seed, number, size):
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        writer.release()
        return path.read_bytes()


def jpegs(seed: int = 0, number: int = 6, size: tuple[int, int] = (64, 48)) -> list[bytes]:
    encoded = []
    for frame in frames(seed, number, size):
        out = io.BytesIO()
        Image.fromarray(frame).save(out, "JPEG")
        encoded.append(out.getvalue())
    return encoded


def frame_list(frames: list[bytes]) -> str:
    """What comes after the comma of a data:video/jpeg URL."""
    return ",".join(base64.b64encode(frame).decode() for frame in frames)


def frames_url(frames: list[bytes]) -> str:
    return f"data:video/jpeg;base64,{frame_list(frames)}"


def file_url(data: bytes) -> str:
    return data_url(data, "video/mp4")
