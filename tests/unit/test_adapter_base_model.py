"""app.adapters.base_model: whether an adapter is for the model that is served."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app import tiny_model
from app.adapters import AdapterRefused
from app.adapters.verify import verify
from tests.adapters import CONFIG, WEIGHTS, make_adapter

FAMILIES = ("qwen3_vl", "qwen2_5_omni", "llava")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model.build(folder / name, name) for name in FAMILIES}


def refused(adapter: Path, model: Path) -> str:
    with pytest.raises(AdapterRefused) as caught:
        verify(adapter, max_rank=16, base_model=str(model))
    return caught.value.message


def change(adapter: Path, old: str, new: str, inputs: int | None = None) -> None:
    """Tensors under another name, or with so many inputs."""
    weights = load_file(adapter / WEIGHTS)
    for name in [one for one in weights if old in one]:
        tensor = weights.pop(name)
        if inputs is not None and ".lora_A." in name:
            tensor = np.ascontiguousarray(np.resize(tensor, (tensor.shape[0], inputs)))
        weights[name.replace(old, new)] = tensor
    save_file(weights, adapter / WEIGHTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_model(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    verify(make_adapter(tmp_path / "adapter", models[family]), max_rank=16, base_model=str(models[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_behind_the_last_one(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", models[family])
    change(adapter, "layers.2.", "layers.3.")
    message = refused(adapter, models[family])
    assert "the model has no " in message and "layers.3.self_attn" in message


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inputs", [64, 256])
def test_a_model_of_another_width(family: str, inputs: int, models: dict[str, Path], tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", models[family])
    change(adapter, "layers.1.self_attn.q_proj", "layers.1.self_attn.q_proj", inputs)
    message = refused(adapter, models[family])
    assert f"q_proj has 128 inputs and 128 outputs in the model, and {inputs} and 128 in the adapter" in message


@pytest.mark.parametrize(("family", "targets"), [("qwen3_vl", ("qkv", "linear_fc1")), ("llava", ("fc1", "linear_1"))])
def test_media_encoders(family: str, targets: tuple[str, ...], models: dict[str, Path], tmp_path: Path) -> None:
    for one in targets:
        adapter = make_adapter(tmp_path / one, models[family], tower_targets=[one])
        assert f"{one}, " in refused(adapter, models[family])
        assert refused(adapter, models[family]).endswith("only the language model can be adapted")


def test_weights_that_are_packed_or_called_otherwise(models: dict[str, Path], tmp_path: Path) -> None:
    """What cannot be told is not refused."""
    model, adapter = models["qwen3_vl"], make_adapter(tmp_path / "adapter", models["qwen3_vl"])
    weights = load_file(model / "model.safetensors")
    packed = {
        name.replace("q_proj.weight", "q_proj.qweight").replace("gate_proj", "w1"): tensor[:8]
        if "q_proj" in name
        else tensor.astype(np.uint8)
        if "k_proj" in name
        else tensor
        for name, tensor in weights.items()
    }
    (tmp_path / "packed").mkdir()
    save_file(packed, tmp_path / "packed" / "model.safetensors")
    verify(adapter, max_rank=16, base_model=str(tmp_path / "packed"))
    (tmp_path / "empty").mkdir()
    for unknown in (str(tmp_path / "empty"), "org/not-here", "no//name"):
        verify(adapter, max_rank=16, base_model=unknown)


def test_a_model_in_the_hubs_cache(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "hub" / "models--org--tiny"
    for name in ("refs", "snapshots"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc").symlink_to(models["qwen3_vl"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    adapter = make_adapter(tmp_path / "adapter", models["qwen3_vl"])
    verify(adapter, max_rank=16, base_model="org/tiny")
    change(adapter, "layers.2.", "layers.3.")
    with pytest.raises(AdapterRefused, match="is for another one"):
        verify(adapter, max_rank=16, base_model="org/tiny")


def test_an_embedding(models: dict[str, Path], tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", models["qwen3_vl"], targets=["q_proj"], rank=4)
    weights = load_file(adapter / WEIGHTS)
    prefix = "base_model.model.model.language_model.embed_tokens.lora_embedding_"
    weights |= {f"{prefix}A": np.zeros((4, 8448), np.float32), f"{prefix}B": np.zeros((128, 4), np.float32)}
    save_file(weights, adapter / WEIGHTS)
    assert json.loads((adapter / CONFIG).read_text())["r"] == 4
    verify(adapter, max_rank=16, base_model=str(models["qwen3_vl"]))
