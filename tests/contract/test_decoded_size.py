"""workers.decoded_size: no less than what vLLM's loaders make of the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.media import FRAMES
from app.messages.media import Modality
from app.settings_media import MediaSettings
from tests import sounds, videos
from tests.contract.test_media_loading import ref
from tests.pictures import encoded
from workers import media_loading
from workers.decoded_size import decoded_size

pytestmark = pytest.mark.usefixtures("vllm")
LIMITS = MediaSettings()
FILMS = videos.file(number=12, size=(96, 64))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_picture(kind: str) -> None:
    data = encoded(kind=kind, size=(31, 17))
    assert decoded_size(ref("image"), data, LIMITS) == np.asarray(_loaded("image", data)).nbytes == 31 * 17 * 3


def test_a_video_of_frames_and_one_in_a_file() -> None:
    listed = videos.frame_list(videos.jpegs(number=3)).encode()
    assert decoded_size(ref("video", FRAMES), listed, LIMITS) == _loaded("video", listed, FRAMES)[0].nbytes
    assert decoded_size(ref("video"), FILMS, LIMITS) >= _loaded("video", FILMS)[0].nbytes > 0
    assert decoded_size(ref("video"), FILMS, MediaSettings(max_video_pixels=1000)) == 3000


@pytest.mark.parametrize("ending", [".wav", ".mp3", ".flac", ".ogg"])
def test_audio(ending: str) -> None:
    data = sounds.file(ending=ending)
    assert decoded_size(ref("audio"), data, LIMITS) >= _loaded("audio", data)[0].nbytes > 0


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_what_cannot_be_opened_takes_nothing(modality: Modality) -> None:
    """The loader refuses it."""
    assert decoded_size(ref(modality), b"nothing", LIMITS) == 0


def _loaded(modality: Modality, data: bytes, media_type: str = "") -> Any:
    kwargs = {"audio": {"audio_backend": "soundfile"}}
    return media_loading.load(ref(modality, media_type), data, kwargs, LIMITS)
