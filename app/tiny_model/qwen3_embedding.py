"""Qwen3 as an embedding model: text alone, one vector from the last token, of which fewer dimensions may be taken.

Laid out as the published ones are: no language head, and a description for Sentence Transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.tiny_model.family import END, PAD, START, Family, save_as, text_config

#: Those that a request may ask for; the last is the whole vector.
DIMENSIONS = (32, 64, 128)

_MODULES = "sentence_transformers.models"


def _model(ids: dict[str, int], tokens: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**text_config(ids, tokens), head_dim=32))


def _save(model: Any, directory: Path) -> None:
    config = model.config
    config.architectures = ["Qwen3ForCausalLM"]
    config.matryoshka_dimensions = list(DIMENSIONS)
    save_as(model.model, directory, {"": ""}, config)


FAMILY = Family(
    special=(PAD, START, END),
    named={},
    parts={},
    model=_model,
    save=_save,
    processors={
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{_MODULES}.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{_MODULES}.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{_MODULES}.Normalize"},
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": DIMENSIONS[-1], "pooling_mode_lasttoken": True},
    },
)
