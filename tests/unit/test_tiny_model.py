"""app.tiny_model: the model that demos and tests run."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app import tiny_model
from app.tiny_model import files


def build_in_a_new_process(directory: Path, family: str, hash_seed: int) -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-m", "app.tiny_model", str(directory), "--family", family],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        check=True,
        timeout=120,
        capture_output=True,
    )


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("family", tiny_model.NAMES)
def test_two_builds_are_the_same_bytes(family: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        build_in_a_new_process(tmp_path / str(seed), family, seed)
    first, second = (digests(tmp_path / str(seed)) for seed in (1, 2))
    assert "model.safetensors" in first
    assert first == second
    assert sum(path.stat().st_size for path in (tmp_path / "1").iterdir()) < 6e6


def test_the_family_is_qwen3_vl_if_none_is_named(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "app.tiny_model", str(tmp_path / "tiny")], check=True, timeout=120)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]


def test_another_family_takes_the_place_of_one(tmp_path: Path) -> None:
    for family, architecture in (("llava", "Llava"), ("qwen2_audio", "Qwen2Audio")):
        tiny_model.build(tmp_path / "tiny", family)
        config = json.loads((tmp_path / "tiny" / "config.json").read_text())
        assert config["architectures"] == [f"{architecture}ForConditionalGeneration"]


def test_a_model_that_is_there_is_kept_and_not_built_again(tmp_path: Path) -> None:
    model = tiny_model.build(tmp_path / "tiny")
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    started = time.monotonic()
    assert tiny_model.build(model) == model
    assert time.monotonic() - started < 1
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before


@pytest.mark.parametrize("damage", ["missing file", "short file", "other recipe"])
def test_a_damaged_or_outdated_model_is_built_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(directory: Path, name: str) -> None:
        (directory / "config.json").write_text("{}")
        marker = {"recipe": files._recipe(name), "files": {"config.json": 2}}
        (directory / "tiny_model.json").write_text(json.dumps(marker))

    monkeypatch.setattr(files, "_write", write)
    directory = tiny_model.build(tmp_path / "tiny")
    if damage == "missing file":
        (directory / "config.json").unlink()
    elif damage == "short file":
        (directory / "config.json").write_text("")
    else:
        marker = (directory / "tiny_model.json").read_text()
        (directory / "tiny_model.json").write_text(re.sub('"recipe": ".', '"recipe": "x', marker))

    tiny_model.build(directory)

    assert (directory / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"], "something was left beside the model"


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="choose another directory"):
        tiny_model.build(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(directory: Path, name: str) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(files, "_write", write)
    with pytest.raises(OSError, match="disk full"):
        tiny_model.build(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, app.tiny_model; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
