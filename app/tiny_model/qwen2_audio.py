"""Qwen2-Audio: audio alone, a token for each 40 ms of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.tiny_model.family import END, PAD, START, Family, save_as, text_config

_AUDIO, _AUDIO_START, _AUDIO_END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
_MELS = 32


def _model(ids: dict[str, int], tokens: int) -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    audio = {
        "num_mel_bins": _MELS,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "max_source_positions": 1500,  # thirty seconds, which every audio is padded to
    }
    config = Qwen2AudioConfig(
        audio_config=audio,
        text_config=text_config(ids, tokens) | {"model_type": "qwen2"},
        audio_token_index=ids[_AUDIO],
        tie_word_embeddings=False,
    )
    return Qwen2AudioForConditionalGeneration(config)


def _save(model: Any, directory: Path) -> None:
    prefixes = {
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
        "model.": "",
    }
    save_as(model, directory, prefixes)


FAMILY = Family(
    special=(PAD, START, END, _AUDIO, _AUDIO_START, _AUDIO_END),
    named={"audio_token": _AUDIO, "audio_bos_token": _AUDIO_START, "audio_eos_token": _AUDIO_END},
    parts={
        "c.type == 'audio' or 'audio' in c or 'audio_url' in c": "{% set count.audio = count.audio + 1 %}"
        f"Audio {{{{ count.audio }}}}: {_AUDIO_START}{_AUDIO}{_AUDIO_END}\n"
    },
    model=_model,
    save=_save,
    processors={
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "Qwen2AudioProcessor",
            "feature_size": _MELS,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
            "padding_value": 0.0,
            "return_attention_mask": True,
        },
    },
)
