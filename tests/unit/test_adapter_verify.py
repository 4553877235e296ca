"""app.adapters.verify: which files are an adapter that an engine can load."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app import tiny_model
from app.adapters import AdapterRefused
from app.adapters.verify import Facts, verify
from tests.adapters import CONFIG, TARGETS, WEIGHTS, make_adapter

Q_PROJ = "model.language_model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", model)


def change(adapter: Path, **fields: Any) -> None:
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rename(adapter: Path, old: str, new: str | None) -> None:
    """The weights with a part of one tensor's name replaced, or without that tensor."""
    weights = load_file(adapter / WEIGHTS)
    for name in [one for one in weights if old in one]:
        tensor = weights.pop(name)
        if new is not None:
            weights[name.replace(old, new)] = tensor
    save_file(weights, adapter / WEIGHTS)


def refused(adapter: Path, max_rank: int = 16) -> str:
    with pytest.raises(AdapterRefused) as caught:
        verify(adapter, max_rank=max_rank)
    assert str(adapter) not in caught.value.message
    return caught.value.message


def test_a_good_one(adapter: Path) -> None:
    found = verify(adapter, max_rank=8)
    size = sum((adapter / name).stat().st_size for name in (CONFIG, WEIGHTS))
    assert found == Facts(8, size, found.modules)
    assert len(found.modules) == 3 * len(TARGETS) and Q_PROJ in found.modules


def test_a_larger_rank_than_the_engines(adapter: Path) -> None:
    assert "rank is 8, and the engine's --max-lora-rank is 4" in refused(adapter, max_rank=4)


def test_the_largest_of_a_pattern_counts(model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", model, rank=8, targets=["q_proj"], rank_pattern={"q_proj": 8})
    change(adapter, r=2)
    assert verify(adapter, max_rank=8).rank == 8
    assert "rank is 8" in refused(adapter, max_rank=4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is '8'"),
        ({"r": True}, "r is True"),
        ({"r": 8.0}, "r is 8.0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"target_modules": None}, "target_modules must be"),
        ({"target_modules": []}, "target_modules must be"),
        ({"target_modules": [1]}, "target_modules must be"),
        ({"use_dora": True}, "use_dora is True, which vLLM does not support"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save is"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"rank_pattern": {"q_proj": -1}}, "positive integers"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"[a.]*[a.]*b": 4}}, "patterns other than a module's name"),
        ({"alpha_pattern": {"(a|a)*b": 4}}, "patterns other than a module's name"),
        ({"rank_pattern": {".*q": 4}}, "patterns other than a module's name"),
        ({"rank_pattern": {"[a": 4}}, "patterns other than a module's name"),
        ({"rank_pattern": {"q" * 257: 4}}, "patterns other than a module's name"),
        (
            {name: {f"layers.{n}.q_proj": 4 for n in range(129)} for name in ("rank_pattern", "alpha_pattern")},
            "258 patterns, and 256 is most",
        ),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern must have numbers"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_configuration_that_cannot_be_served(adapter: Path, fields: dict[str, Any], said: str) -> None:
    change(adapter, **fields)
    message = refused(adapter)
    assert message.startswith(f"{CONFIG}: ") and said in message
    assert len(message) < 300


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "\xff", "{}" + " " * (1 << 20)])
def test_a_configuration_that_is_none(adapter: Path, text: str) -> None:
    (adapter / CONFIG).write_bytes(text.encode("latin-1"))
    assert refused(adapter).startswith(f"{CONFIG}: ")


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 5000, -1])
def test_truncated_weights(adapter: Path, kept: int) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:kept])
    assert "truncated" in refused(adapter)


@pytest.mark.parametrize("more", [b"\0", b"x" * 1000])
def test_more_bytes_than_tensors(adapter: Path, more: bytes) -> None:
    with open(adapter / WEIGHTS, "ab") as file:
        file.write(more)
    assert "truncated, or no safetensors file" in refused(adapter)


def test_a_pickle_under_the_name_of_safetensors(adapter: Path) -> None:
    (adapter / WEIGHTS).write_bytes(b"PK\x03\x04" + bytes(1000))
    assert "no safetensors file" in refused(adapter)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [8, 128], "data_offsets": [4096, 8192]},
        {"dtype": "F32", "shape": [8, 129], "data_offsets": [0, 4096]},
        {"dtype": "F32", "shape": [8, 128], "data_offsets": [0, 1 << 60]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4096]},
        {"dtype": "Q7", "shape": [8, 128], "data_offsets": [0, 4096]},
        {"dtype": "F32", "shape": [-8, -128], "data_offsets": [0, 4096]},
    ],
    ids=["hole", "shape", "far", "overflow", "type", "negative"],
)
def test_a_header_that_does_not_fit_its_file(adapter: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({f"base_model.model.{Q_PROJ}.lora_A.weight": entry}).encode()
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4096))
    assert "no safetensors file" in refused(adapter)


def test_tensors_that_are_none_of_an_adapter(adapter: Path) -> None:
    rename(adapter, f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.weight")
    assert f"{Q_PROJ}.weight is no tensor of a LoRA adapter" in refused(adapter)


def test_a_factor_without_the_other(adapter: Path) -> None:
    rename(adapter, f"{Q_PROJ}.lora_B", None)
    assert f"one of the two factors is missing of {Q_PROJ}" in refused(adapter)


def test_a_rank_that_the_tensors_do_not_have(adapter: Path) -> None:
    change(adapter, r=4)
    assert "and is no factor of rank 4" in refused(adapter)


@pytest.mark.parametrize("shape", [(), (8,), (8, 128, 1), (0, 128)])
def test_a_tensor_that_is_no_matrix(adapter: Path, shape: tuple[int, ...]) -> None:
    weights = load_file(adapter / WEIGHTS)
    weights[f"base_model.model.{Q_PROJ}.lora_A.weight"] = np.zeros(shape, np.float32)
    save_file(weights, adapter / WEIGHTS)
    assert f"has shape {list(shape)}" in refused(adapter)


def test_a_type_that_is_no_weights(adapter: Path) -> None:
    weights = load_file(adapter / WEIGHTS)
    name = f"base_model.model.{Q_PROJ}.lora_A.weight"
    weights[name] = weights[name].astype(np.int8)
    save_file(weights, adapter / WEIGHTS)
    assert "is of type I8" in refused(adapter)


def test_no_tensors(adapter: Path) -> None:
    save_file({}, adapter / WEIGHTS)
    assert "it has no tensors" in refused(adapter)


def empty_tensors(adapter: Path, names: Iterable[str]) -> None:
    header = json.dumps({one: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for one in names}).encode()
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)


def test_more_tensors_than_any_model_has_modules(adapter: Path) -> None:
    empty_tensors(adapter, map(str, range(131_073)))
    assert "131073 tensors, and 131072 is most" in refused(adapter)
    empty_tensors(adapter, map(str, range(20_000)))
    assert "is no tensor of a LoRA adapter" in refused(adapter)
    change(adapter, rank_pattern={f"layers.{n}.q_proj": 4 for n in range(100)}, alpha_pattern={"q_proj": 1, "k": 2})
    assert "20000 tensors, which are too many for 102 patterns" in refused(adapter)


def test_a_name_that_is_too_long(adapter: Path) -> None:
    rename(adapter, f"{Q_PROJ}.lora_A", f"{'a.' * 1000}q_proj.lora_A")
    assert "names of more than 512 characters" in refused(adapter)
