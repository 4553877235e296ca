"""workers.audio_resampling: which library vLLM resamples with, on a host with torchaudio and on one without."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workers import audio_resampling


@pytest.fixture
def resampler(vllm: Any) -> Any:
    from vllm.multimodal.audio import AudioResampler

    return AudioResampler(target_sr=16_000)


@pytest.fixture
def without_torchaudio(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal import audio
    from vllm.utils.import_utils import PlaceholderModule

    monkeypatch.setattr(audio, "torchaudio", PlaceholderModule("torchaudio"))


def settle(resampler: Any) -> str:
    info = SimpleNamespace(data_parser=SimpleNamespace(audio_resampler=resampler))
    audio_resampling.settle(SimpleNamespace(mm_processor=SimpleNamespace(info=info)))
    return str(resampler.method)


@pytest.mark.usefixtures("without_torchaudio")
def test_soxr_takes_the_place_of_torchaudio(resampler: Any) -> None:
    second = np.sin(np.arange(44_100) * (2 * np.pi * 440 / 44_100)).astype(np.float32)
    assert settle(resampler) == "soxr"
    made = resampler.resample(second, orig_sr=44_100)
    assert made.dtype == np.float32 and made.shape == (16_000,)
    expected = np.sin(np.arange(16_000) * (2 * np.pi * 440 / 16_000))
    assert np.abs(made - expected)[500:-500].max() < 1e-3


@pytest.mark.usefixtures("without_torchaudio")
def test_what_a_model_itself_asks_for_is_left(resampler: Any) -> None:
    resampler.method = "scipy"
    assert settle(resampler) == "scipy"
    audio_resampling.settle(SimpleNamespace(mm_processor=None))


def test_torchaudio_is_used_where_there_is_one(resampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal import audio

    monkeypatch.setattr(audio, "torchaudio", SimpleNamespace())
    assert settle(resampler) == "torchaudio"
