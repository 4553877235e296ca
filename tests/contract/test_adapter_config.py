"""app.adapters.config refuses all that vLLM's own reader of adapters refuses, and agrees about ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.adapters import AdapterRefused
from app.adapters.config import read_config

BASE: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
#: Fields of vLLM's PEFTHelper -> values, some of which it takes.
VALUES: dict[str, list[Any]] = {
    "r": [1, 8, 16, 0, -1],
    "lora_alpha": [1, 2.5],
    "bias": ["none", "all", "lora_only"],
    "modules_to_save": [None, [], ["embed_tokens"]],
    "use_rslora": [True, False],
    "use_dora": [True, False],
    "lora_bias": [True, False],
    "init_lora_weights": [True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga", "pissa", "olora", "loftq"],
    "alora_invocation_tokens": [None, [1, 2]],
    "layer_replication": [None, [[0, 4]]],
    "use_bdlora": [None, {"nblocks": 2}],
    "use_qalora": [True, False],
    "rank_pattern": [None, {}, {"q_proj": 4}, {"q_proj": 0}, {"q_proj": "4"}],
    "alpha_pattern": [None, {}, {"q_proj": 4.0}],
}


@pytest.fixture
def helper(vllm: Any) -> Any:
    from vllm.lora import peft_helper

    return peft_helper.PEFTHelper


def vllm_takes(helper: Any, folder: Path) -> bool:
    from vllm.config.lora import LoRAConfig

    try:
        helper.from_local_dir(str(folder), 4096).validate_legal(LoRAConfig(max_lora_rank=16))
    except ValueError:
        return False
    return True


def we_take(folder: Path) -> bool:
    try:
        read_config(folder)
    except AdapterRefused:
        return False
    return True


@pytest.mark.parametrize(("name", "value"), [(name, one) for name, values in VALUES.items() for one in values], ids=str)
def test_the_same_configurations_are_refused(name: str, value: Any, helper: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(BASE | {name: value}))
    assert we_take(tmp_path) == vllm_takes(helper, tmp_path)


def test_no_field_of_vllms_is_unknown_here(helper: Any) -> None:
    import dataclasses

    own = {one.name for one in dataclasses.fields(helper) if not one.name.startswith("vllm_")}
    assert own == {*VALUES, "target_modules"}


@pytest.mark.parametrize(
    "pattern",
    [
        *[
            "q_proj",
            "self_attn.q_proj",
            "roj",
            "model.layers.0.self_attn.q_proj",
            "^q_proj",
            "^model.layers.0.self_attn",
        ],
        *[
            "^model.layers.0.self_attn.q_proj",
            r"layers\.0\.self_attn\.q_proj",
            r"self_attn\.q\.proj",
            "self.attn.q.proj",
        ],
    ],
)
def test_ranks_are_the_same(pattern: str, helper: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(BASE | {"rank_pattern": {pattern: 4, "k_proj": 2}}))
    ours, theirs = read_config(tmp_path), helper.from_local_dir(str(tmp_path), 4096)
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "x.k_proj", "q_proj"):
        assert ours.rank_of(module) == theirs.get_rank_and_scaling(module)[0]
