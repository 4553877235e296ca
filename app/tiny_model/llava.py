"""LLaVA: images alone, each of the same number of tokens, and no grid of patches that positions depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.tiny_model.family import END, PAD, START, Family, save_as, text_config

_IMAGE = "<image>"
_PIXELS, _PATCH = 96, 16


def _model(ids: dict[str, int], tokens: int) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": _PIXELS,
        "patch_size": _PATCH,
        "projection_dim": 64,
    }
    config = LlavaConfig(
        text_config=text_config(ids, tokens) | {"model_type": "llama", "head_dim": 32},
        vision_config=vision,
        image_token_index=ids[_IMAGE],
        image_seq_length=(_PIXELS // _PATCH) ** 2,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def _save(model: Any, directory: Path) -> None:
    prefixes = {
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.": "",
    }
    save_as(model, directory, prefixes)


FAMILY = Family(
    special=(PAD, START, END, _IMAGE),
    named={"image_token": _IMAGE},
    parts={"c.type == 'image' or 'image' in c or 'image_url' in c": _IMAGE},
    model=_model,
    save=_save,
    processors={
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": _PIXELS},
            "crop_size": {"height": _PIXELS, "width": _PIXELS},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": _PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": _IMAGE,
        },
    },
)
