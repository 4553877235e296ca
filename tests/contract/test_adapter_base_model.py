"""app.adapters.base_model: whether an adapter is for the model that is served."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app import tiny_model
from app.adapters import AdapterRefused
from app.adapters.base_model import refuse_encoders
from app.adapters.verify import verify
from tests.adapters import CONFIG, WEIGHTS, make_adapter

FAMILIES = ("qwen3_vl", "qwen2_5_omni", "llava")
LAYER = "model.language_model.layers.0"

pytestmark = pytest.mark.usefixtures("vllm")


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


@pytest.mark.parametrize(
    "module",
    [
        "model.decoder.layers.0.self_attn.q_proj",
        "transformer.h.0.attn.q_proj",
        "foo.q_proj",
        "model.layers.0.attention.q_proj",
        "model.layers.0.self_attn.q_proj",
        "model.language_model.model.layers.0.self_attn.q_proj",
        f"base_model.model.{LAYER}.self_attn.q_proj",
    ],
)
def test_another_architecture(module: str, models: dict[str, Path], tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", models["qwen3_vl"], targets=["q_proj"])
    change(adapter, f"{LAYER}.self_attn.q_proj", module)
    assert refused(adapter, models["qwen3_vl"]) == f"the model has no {module}: the adapter is for another one"


def test_names_that_vllm_maps_to_the_models(models: dict[str, Path], tmp_path: Path) -> None:
    """Its own, and those of a checkpoint that is older than the adapter."""
    adapter = make_adapter(tmp_path / "adapter", models["qwen3_vl"])
    change(adapter, "model.language_model.", "language_model.model.")
    verify(adapter, max_rank=16, base_model=str(models["qwen3_vl"]))
    assert any(name.startswith("language_model.model.") for name in load_file(models["llava"] / "model.safetensors"))
    adapter = make_adapter(tmp_path / "newer", models["llava"])
    assert any(".model.model.language_model." in name for name in load_file(adapter / WEIGHTS))
    verify(adapter, max_rank=16, base_model=str(models["llava"]))


def test_what_vllm_does_not_load_of_a_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    model = changed_model(models["qwen2_5_omni"], tmp_path / "model", {"thinker.model.": "talker.model."}, keep=True)
    adapter = make_adapter(tmp_path / "adapter", models["qwen2_5_omni"], targets=["q_proj"])
    verify(adapter, max_rank=16, base_model=str(model))
    change(adapter, "thinker.model.", "talker.model.")
    assert "the model has no talker.model.layers" in refused(adapter, model)


@pytest.mark.parametrize(
    "module", ["embed_vision.fc", "model.embed_audio.fc", "mlp1.1", "resampler.kv_proj", "vpm.x.q_proj", "projector.fc"]
)
def test_names_of_media_encoders(module: str) -> None:
    with pytest.raises(AdapterRefused, match="only the language model"):
        refuse_encoders({module: None})
    refuse_encoders({f"{LAYER}.mlp.experts.0.up_proj": None, "lm_head": None, "model.embed_tokens": None})


def changed_model(model: Path, folder: Path, renamed: dict[str, str], *, keep: bool = False) -> Path:
    """A copy with other names of tensors, or with the old ones, too."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for old, new in renamed.items():
        for name in [one for one in weights if old in one]:
            weights[name.replace(old, new)] = weights[name] if keep else weights.pop(name)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_weights_that_are_packed(models: dict[str, Path], tmp_path: Path) -> None:
    """Of their shapes nothing is known."""
    model = changed_model(models["qwen3_vl"], tmp_path / "packed", {"q_proj.weight": "q_proj.qweight"})
    weights = load_file(model / "model.safetensors")
    for name in weights:
        if "q_proj" in name:
            weights[name] = weights[name][:8]
        elif "k_proj" in name:
            weights[name] = weights[name].astype(np.uint8)
    save_file(weights, model / "model.safetensors")
    verify(make_adapter(tmp_path / "adapter", models["qwen3_vl"]), max_rank=16, base_model=str(model))


def test_experts(models: dict[str, Path], tmp_path: Path) -> None:
    """One by one, as in the checkpoint, and all of a layer at once."""
    experts = {".mlp.up_proj.": ".mlp.experts.0.up_proj.", ".mlp.down_proj.": ".mlp.experts.0.down_proj."}
    model = changed_model(models["qwen3_vl"], tmp_path / "moe", experts)
    adapter = make_adapter(tmp_path / "adapter", model, targets=["up_proj"])
    verify(adapter, max_rank=16, base_model=str(model))
    change(adapter, ".experts.0.up_proj.", ".experts.base_layer.")
    verify(adapter, max_rank=16, base_model=str(model))
    change(adapter, "layers.2.mlp.experts.", "layers.2.mlp.others.experts.")
    assert "layers.2.mlp.others.experts.base_layer" in refused(adapter, model)


def test_a_model_that_cannot_be_compared(models: dict[str, Path], tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", models["qwen3_vl"])
    (tmp_path / "empty").mkdir()
    for unknown in (tmp_path / "empty", Path("org/not-here"), Path("a/b/c")):
        assert refused(adapter, unknown).startswith("no safetensors of the served model are on a worker's host")
    model = changed_model(models["qwen3_vl"], tmp_path / "model", {})
    for config in ({"architectures": ["NoSuchModel"]}, {}, []):
        (model / "config.json").write_text(json.dumps(config))
        assert refused(adapter, model).startswith("vLLM has no class for the served model")


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
