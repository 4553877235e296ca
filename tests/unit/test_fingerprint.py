"""app.media.fingerprint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.media import fingerprint
from app.settings import Settings, SettingsError
from app.settings_sections import EngineSettings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))
    (folder / "tokenizer.json").write_text("{}" * 1000)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "generation_config.json").write_text('{"temperature": 1}')
    return folder


def of(folder: Path, revision: str | None = None, **processor: Any) -> str:
    return fingerprint.fingerprint(str(folder), revision, processor)


def of_args(folder: Path | str, args: str = "", **roles: str) -> str:
    return fingerprint.of_settings(Settings(model=str(folder), engine=EngineSettings(args=args, **roles)))


def test_equal_copies_have_one_fingerprint(model: Path, tmp_path: Path) -> None:
    there = shutil.copytree(model, tmp_path / "elsewhere" / "other")
    os.utime(there / "config.json", (0, 0))
    assert of(there) == of(model)
    assert of_args(f"{there}/", "--dtype float32") == of_args(model, "--dtype float32")
    assert len(of(model)) == 32 and int(of(model), 16)


@pytest.mark.parametrize(
    "name", ["config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors.index.json"]
)
def test_every_byte_of_a_small_file_counts(model: Path, name: str) -> None:
    before, text = of(model), (model / name).read_text()
    (model / name).write_text(f"{text[:-1]} ")
    assert of(model) != before
    (model / name).write_text(text)
    assert of(model) == before


def test_weights_count_by_size_and_samples(model: Path) -> None:
    """Another training of the same architecture has files of the same sizes."""
    before, weights = of(model), (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights + b"\0")
    assert of(model) != before
    (model / "model.safetensors").write_bytes(bytes(255 - one for one in weights))
    assert of(model) != before
    (model / "model.safetensors").write_bytes(weights[:-1] + b"\0")
    assert of(model) != before, "the last byte is in the last sample"
    (model / "model.safetensors").write_bytes(weights)
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert of(model) != before


def test_a_new_file_counts_unless_it_has_no_part_in_items(model: Path) -> None:
    before = of(model)
    (model / "generation_config.json").write_text('{"temperature": 0}')
    (model / "README.md").write_text("words")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / ".cache").mkdir()
    assert of(model) == before
    (model / "processor_config.json").write_text("{}")
    assert of(model) != before


def test_revision_and_processor_count(model: Path) -> None:
    found = [of(model), of(model, "a"), of(model, kwargs={"max_pixels": 1}), of(model, kwargs={"max_pixels": 2})]
    assert len(set(found)) == 4
    assert of(model, a=1, b={"c": 1, "d": 2}) == of(model, b={"d": 2, "c": 1}, a=1)


SHAPING = [
    "--dtype float32",
    "--revision 12e4",
    "--tokenizer other/tokenizer",
    "--trust-remote-code",
    "--no-trust-remote-code",
    "--mm-processor-kwargs '{\"max_pixels\": 1000}'",
    "--mm-processor-kwargs.max_pixels 1000",
    "--mm-processor-kwargs.max_pixels 1001",
    '--media-io-kwargs \'{"video": {"num_frames": 8}}\'',
    "--hf-overrides.text_config.num_hidden_layers=2",
    "--load-format dummy",
    "--video-pruning-rate 0.5",
]


def test_every_flag_that_shapes_items_counts(model: Path) -> None:
    found = {flags: of_args(model, flags) for flags in ["", *SHAPING]}
    assert len(set(found.values())) == len(found)
    both = of_args(model, " ".join(SHAPING[:3]))
    assert both not in found.values()


def test_other_flags_do_not(model: Path) -> None:
    plain = of_args(model)
    for flags in ("--max-model-len 4096 -tp 2 -O3", "--model x --kv-cache-memory-bytes 5", "--enforce-eager --seed=1"):
        assert of_args(model, flags) == plain
    assert of_args(model, encode_args="--max-num-seqs 4", decode_args="--kv-cache-dtype fp8") == plain


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ('--mm_processor_kwargs \'{"a":1,"b_c":2}\'', '--mm-processor-kwargs=\'{ "b_c": 2, "a": 1 }\''),
        ("--dtype float32", "--dtype bfloat16 --max-num-seqs 4 --dtype=float32"),
        ("--dtype float32", "--dty float32"),
        ("--media_io_kwargs.video.num_frames 4", "--media-io-kwargs.video.num_frames=4"),
        ("--trust-remote-code", "--trust_remote_code"),
    ],
)
def test_one_meaning_in_two_spellings(model: Path, one: str, two: str) -> None:
    assert of_args(model, one) == of_args(model, two) != of_args(model)


def test_flags_mean_what_they_mean_to_vllm(vllm: Any, model: Path) -> None:
    """vLLM has every flag, and takes for true what counts here as given."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    known = {option for action in parser._actions for option in action.option_strings}
    # Read by the parser itself, before its options.
    assert {f"--{name}" for name in fingerprint.FIELDS if name != "config"} <= known
    others = {name.removeprefix("--") for name in known} - {*fingerprint.FIELDS, "model"}
    beginnings = [one for one in others for field in fingerprint.FIELDS if field.startswith(one)]
    assert not beginnings, "would be taken for an abbreviation"


@pytest.mark.parametrize("role", ["encode_args", "prefill_args", "decode_args"])
def test_roles_have_to_agree(model: Path, role: str) -> None:
    with pytest.raises(SettingsError, match=f"engine.{role} .*TRIVET_ENGINE__{role.upper()}.*--dtype decides"):
        of_args(model, "--max-num-seqs 4", **{role: "--dtype float16"})
    with pytest.raises(SettingsError, match="--mm-processor-kwargs.max_pixels decides"):
        of_args(model, **{role: "--mm-processor-kwargs.max_pixels 4"})
    assert of_args(model, "--dtype float16", **{role: "--dtype float16"}) == of_args(model, "--dtype float16")


def test_flags_that_cannot_be_read_are_named(model: Path) -> None:
    with pytest.raises(SettingsError, match="engine.args"):
        of_args(model, "--token x")


def test_a_tokenizer_of_its_own_counts_by_its_files(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("same")
    first, second = (of_args(model, f"--tokenizer {tmp_path / name}") for name in ("a", "b"))
    assert first == second
    (tmp_path / "b" / "tokenizer.json").write_text("other")
    assert of_args(model, f"--tokenizer {tmp_path / 'b'}") != first


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def cached(cache: Path, name: str, commit: str, revision: str = "main") -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text("{}")
    return folder / "snapshots" / commit


def test_a_hub_name_counts_by_its_commit(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    unknown = of_args("org/model")
    assert "from its name and revision alone" in caplog.text
    caplog.clear()
    cached(cache, "org/model", "a" * 40)
    cached(cache, "org/other", "a" * 40)
    first = of_args("org/model")
    snapshot = cached(cache, "org/model", "b" * 40)
    cached(cache, "org/model", "c" * 40, "branch")
    found = [of_args("org/model"), of_args("org/model", "--dtype half"), of_args("org/model", "--revision branch")]
    found += [unknown, first, of_args("org/other")]
    assert len(set(found)) == len(found) and not caplog.text
    # It has more files where the weights were loaded: the commit names them all.
    (snapshot / "model.safetensors").write_bytes(b"weights")
    assert of_args("org/model") == found[0]


@pytest.mark.parametrize("name", ["s3://bucket/model", "", "a/b/c"])
def test_what_is_no_hub_name_counts_as_it_is(name: str, cache: Path) -> None:
    assert of_args(name) != of_args(f"{name}x")
