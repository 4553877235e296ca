"""What the families share, and what each of them says for itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_POSITIONS = 8192
#: One module of this package each.
NAMES = ("qwen3_vl", "qwen2_audio", "qwen2_5_omni", "llava", "qwen3_embedding")

END = "<|im_end|>"
PAD = "<|endoftext|>"
START = "<|im_start|>"


def save(model: Any, directory: Path) -> None:
    """The model's configuration and weights, as transformers writes them."""
    model.save_pretrained(directory)


def save_as(model: Any, directory: Path, prefixes: Mapping[str, str], config: Any = None) -> None:
    """With the names of weights that published checkpoints have, where transformers writes others.

    The first of `prefixes` that a name begins with is replaced. `config` is the model's own if not given.
    """
    from safetensors.torch import save

    config = config or model.config
    config.architectures = config.architectures or [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(directory)
    weights = {_renamed(name, prefixes): weight.contiguous() for name, weight in model.state_dict().items()}
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    old = next(prefix for prefix in prefixes if name.startswith(prefix))
    return prefixes[old] + name.removeprefix(old)


@dataclass(frozen=True)
class Family:
    """A model family's recipe.

    `special` tokens get ids of their own behind the words; `named` are those that the processor looks up in the
    tokenizer, by attribute. `parts` is the inside of the chat template's loop over a message's content parts, by
    condition. `model` makes the transformers model, from the special tokens' ids and the number of tokens; `processors`
    are files and their content, in JSON; `save` writes what `model` made.
    """

    special: tuple[str, ...]
    named: Mapping[str, str]
    parts: Mapping[str, str]
    model: Callable[[dict[str, int], int], Any]
    processors: Mapping[str, Any]
    save: Callable[[Any, Path], None] = save
    end: str = END
    pad: str = PAD
    #: Sets what the weights are; chosen by looking at answers.
    seed: int = 2


def load(name: str) -> Family:
    """The recipe of one of NAMES."""
    recipe: Family = importlib.import_module(f"app.tiny_model.{name}").FAMILY
    return recipe


def text_config(ids: dict[str, int], tokens: int) -> dict[str, Any]:
    """The language model that the families have in common."""
    return {
        "vocab_size": (tokens + 63) // 64 * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,  # tied and random, it would repeat its last word for ever
        "eos_token_id": ids[END],
        "bos_token_id": ids[PAD],
    }
