"""LoRA adapters of random weights for the tiny models, in the files that PEFT writes, and models with one merged in.

    made = make_adapter(tmp_path / "sql", tiny_model, seed=1)
    reference = merge(tiny_model, made, tmp_path / "merged")

A merged model's greedy output is what the base model's through the adapter has to be, whatever runs it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: With rank 8 and twice that as alpha, a change as large as the tiny models' own weights.
SPREAD = 0.2

_MODEL = "model.safetensors"
_PREFIX = "base_model.model."
#: Of modules that are not the language model's.
_TOWERS = ("visual.", "vision_tower.", "audio_tower.", "multi_modal_projector.")
#: PEFT names modules as transformers does, and some published checkpoints are older than that.
_RENAMED = {"language_model.model.": "model.language_model."}


def make_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 8,
    seed: int = 0,
    targets: Collection[str] = TARGETS,
    tower_targets: Collection[str] = (),
    **config: Any,
) -> Path:
    """An adapter for the tiny model in `model`: of the language model's `targets` in every layer, and of the towers'
    `tower_targets`. `config` is laid over adapter_config.json."""
    random = np.random.default_rng(seed)
    tensors: Arrays = {}
    for name, (outputs, inputs) in _modules(model, targets, tower_targets):
        for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            weight = random.normal(0, SPREAD, shape).astype(np.float32)
            tensors[f"{_PREFIX}{_as_peft(name)}.lora_{factor}.weight"] = weight
    assert tensors, f"{model} has none of {targets}, {tower_targets}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    named = sorted({*targets, *tower_targets})
    (folder / CONFIG).write_text(json.dumps(_config(model, rank, named) | config, indent=2))
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """The model with the adapter's change in its weights (W + alpha / r · B A), in a folder of its own."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / CONFIG).read_text())
    weights, factors = load_file(model / _MODEL), load_file(adapter / WEIGHTS)
    names = {_as_peft(name.removesuffix(".weight")): name for name in weights}
    for name in factors:
        module, is_a, _ = name.removeprefix(_PREFIX).partition(".lora_A.weight")
        if is_a:
            change = factors[f"{_PREFIX}{module}.lora_B.weight"] @ factors[name]
            weights[names[module]] = weights[names[module]] + config["lora_alpha"] / config["r"] * change
    save_file(weights, folder / _MODEL, metadata={"format": "pt"})
    return folder


def _modules(
    model: Path, targets: Collection[str], tower_targets: Collection[str]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name in the checkpoint, shape of the weight)."""
    for name, weight in sorted(load_file(model / _MODEL).items()):
        module = name.removesuffix(".weight")
        wanted = tower_targets if any(one in name for one in _TOWERS) else targets
        if module != name and weight.ndim == 2 and module.rpartition(".")[2] in wanted:
            yield module, (weight.shape[0], weight.shape[1])


def _as_peft(name: str) -> str:
    old = next((one for one in _RENAMED if name.startswith(one)), None)
    return name if old is None else _RENAMED[old] + name.removeprefix(old)


def _config(model: Path, rank: int, targets: list[str]) -> dict[str, Any]:
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": str(model),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_to_transform": None,
        "lora_alpha": 2 * rank,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
