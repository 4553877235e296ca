"""Qwen3-VL: images and videos, with grids, timestamps and deepstack layers."""

from __future__ import annotations

from typing import Any

from app.tiny_model.family import END, PAD, START, Family, text_config

_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"
_VISION_START, _VISION_END = "<|vision_start|>", "<|vision_end|>"


def _model(ids: dict[str, int], tokens: int) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = text_config(ids, tokens) | {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[_IMAGE],
        video_token_id=ids[_VIDEO],
        vision_start_token_id=ids[_VISION_START],
        vision_end_token_id=ids[_VISION_END],
        tie_word_embeddings=False,
    )
    return Qwen3VLForConditionalGeneration(config)


_PIXELS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "processor_class": "Qwen3VLProcessor",
}
FAMILY = Family(
    special=(PAD, START, END, _VISION_START, _VISION_END, "<|vision_pad|>", _IMAGE, _VIDEO),
    named={
        "image_token": _IMAGE,
        "video_token": _VIDEO,
        "vision_bos_token": _VISION_START,
        "vision_eos_token": _VISION_END,
    },
    parts={
        "c.type == 'image' or 'image' in c or 'image_url' in c": f"{_VISION_START}{_IMAGE}{_VISION_END}",
        "c.type == 'video' or 'video' in c": f"{_VISION_START}{_VIDEO}{_VISION_END}",
    },
    model=_model,
    processors={
        "preprocessor_config.json": _PIXELS
        | {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 4096, "longest_edge": 262144},
        },
        "video_preprocessor_config.json": _PIXELS
        | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 1048576},
            "fps": 2,
            "min_frames": 4,
            "max_frames": 64,
            "cap_pixels_per_frame": False,
        },
    },
)
