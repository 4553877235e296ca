"""Audio for tests."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import soundfile

from tests.pictures import data_url

#: Ending -> libsndfile's format and subtype.
CODECS = {
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}


def samples(seed: int = 0, seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> Any:
    """Noise around a tone: different seeds give different sounds."""
    random = np.random.RandomState(seed)
    count = int(seconds * rate)
    tone = np.sin(np.arange(count) * (0.05 + 0.01 * seed))
    return (0.3 * tone[:, None] + 0.05 * random.randn(count, channels)).astype(np.float32)


def file(seed: int = 0, ending: str = ".wav", rate: int = 16_000, data: Any = None, **shape: Any) -> bytes:
    """An audio file of `data`, or of `samples`."""
    form, subtype = CODECS[ending]
    out = io.BytesIO()
    soundfile.write(
        out, samples(seed, rate=rate, **shape) if data is None else data, rate, format=form, subtype=subtype
    )
    return out.getvalue()


def silence(seconds: float, ending: str = ".flac", rate: int = 16_000, channels: int = 1) -> bytes:
    return file(ending=ending, rate=rate, data=np.zeros((int(seconds * rate), channels), dtype=np.float32))


def file_url(data: bytes, media_type: str = "audio/wav") -> str:
    return data_url(data, media_type)


def input_audio(data: bytes, kind: str = "wav") -> dict[str, Any]:
    """OpenAI's content part."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}
