"""The thinker of Qwen2.5-Omni: images, videos and audio, whose positions depend on grids, lengths and seconds.

The sound of a video is not listened to (`use_audio_in_video`), and there is no talker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.tiny_model.family import END, PAD, START, Family, save_as, text_config

_AUDIO, _AUDIO_START, _AUDIO_END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
_IMAGE, _VIDEO = "<|IMAGE|>", "<|VIDEO|>"
_VISION_START, _VISION_END = "<|vision_bos|>", "<|vision_eos|>"
_MELS, _PATCH = 32, 14


def _model(ids: dict[str, int], tokens: int) -> Any:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    text = text_config(ids, tokens) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [6, 5, 5]},
    }
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": _PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 4 * 2 * _PATCH,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 128,
    }
    audio = {
        "num_mel_bins": _MELS,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "output_dim": 128,
        "n_window": 100,
        "max_source_positions": 1500,
    }
    config = Qwen2_5OmniThinkerConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        audio_token_index=ids[_AUDIO],
        image_token_index=ids[_IMAGE],
        video_token_index=ids[_VIDEO],
        audio_start_token_id=ids[_AUDIO_START],
        audio_end_token_id=ids[_AUDIO_END],
        vision_start_token_id=ids[_VISION_START],
        vision_end_token_id=ids[_VISION_END],
        tie_word_embeddings=False,
    )
    return Qwen2_5OmniThinkerForConditionalGeneration(config)


def _save(thinker: Any, directory: Path) -> None:
    """As a part of the whole Qwen2.5-Omni, which is the only form that vLLM's thinker is loaded from."""
    from transformers import Qwen2_5OmniConfig

    config = Qwen2_5OmniConfig(thinker_config=thinker.config.to_dict(), enable_audio_output=False)
    config.architectures = ["Qwen2_5OmniModel"]
    save_as(thinker, directory, {"": "thinker."}, config)


_PIXELS = {
    "processor_class": "Qwen2_5OmniProcessor",
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": _PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
FAMILY = Family(
    special=(PAD, START, END, _AUDIO, _AUDIO_START, _AUDIO_END, _IMAGE, _VIDEO, _VISION_START, _VISION_END),
    named={
        "audio_token": _AUDIO,
        "audio_bos_token": _AUDIO_START,
        "audio_eos_token": _AUDIO_END,
        "image_token": _IMAGE,
        "video_token": _VIDEO,
        "vision_bos_token": _VISION_START,
        "vision_eos_token": _VISION_END,
    },
    parts={
        "c.type == 'image' or 'image' in c or 'image_url' in c": f"{_VISION_START}{_IMAGE}{_VISION_END}",
        "c.type == 'video' or 'video' in c": f"{_VISION_START}{_VIDEO}{_VISION_END}",
        "c.type == 'audio' or 'audio' in c or 'audio_url' in c": f"{_AUDIO_START}{_AUDIO}{_AUDIO_END}",
    },
    model=_model,
    save=_save,
    processors={
        "preprocessor_config.json": _PIXELS
        | {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 3136, "longest_edge": 262144},
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": _MELS,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
            "padding_value": 0.0,
            "return_attention_mask": True,
        },
        "video_preprocessor_config.json": _PIXELS
        | {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": {"shortest_edge": 3136, "longest_edge": 1048576},
            "fps": 2,
            "min_frames": 4,
            "max_frames": 64,
            "cap_pixels_per_frame": False,
        },
    },
)
