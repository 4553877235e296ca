"""Adapter to vLLM: resampling audio to the model's rate with a library that is installed."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def settle(renderer: Any) -> None:
    """Let vLLM resample with soxr where it would with torchaudio and there is none.

    torchaudio's default build needs CUDA's libraries, so a host without a GPU has none, and vLLM would fail with every
    audio that has not the model's own rate. soxr comes with librosa, which resamples with it too.
    """
    from vllm.multimodal import audio
    from vllm.utils.import_utils import PlaceholderModule

    if renderer.mm_processor is None or not isinstance(audio.torchaudio, PlaceholderModule):
        return
    resampler = renderer.mm_processor.info.data_parser.audio_resampler
    if resampler.target_sr is not None and resampler.method == "torchaudio":
        log.info("audio is resampled with soxr: torchaudio is not installed")
        resampler.method = "soxr"
