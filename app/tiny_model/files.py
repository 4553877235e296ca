"""A family's files, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from app.tiny_model import family, weights, words

_MARKER = "tiny_model.json"


def build(directory: Path, name: str = "qwen3_vl") -> Path:
    """Make a family's model in `directory` and return that path; one that is there, whole and of this recipe, is kept.

    The files are the same bytes each time, for the same releases of torch, transformers and tokenizers. They are
    written beside `directory` and renamed, so that nobody sees half a model. Raises FileExistsError if the
    directory holds something else.
    """
    if _is_complete(directory, name):
        return directory
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARKER).is_file():
        raise FileExistsError(f"{directory} holds something other than a tiny model: choose another directory")
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        _write(fresh, name)
        _put_in_place(fresh, directory, scratch / "old", name)
    finally:
        shutil.rmtree(scratch)
    return directory


def _put_in_place(fresh: Path, directory: Path, old: Path, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        directory.rename(old)
    try:
        fresh.rename(directory)
    except OSError:
        if not _is_complete(directory, name):  # another process may have been quicker, and its model is as good
            raise


def _recipe(name: str) -> str:
    """Names what the files follow from: the family, this package and the releases of what writes them."""
    releases = [f"{one}=={importlib.metadata.version(one)}" for one in ("torch", "transformers", "tokenizers")]
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(sources) + " ".join([name, *releases]).encode()).hexdigest()


def _is_complete(directory: Path, name: str) -> bool:
    try:
        marker = json.loads((directory / _MARKER).read_text())
        sizes = {one: (directory / one).stat().st_size for one in marker["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return bool(marker == {"recipe": _recipe(name), "files": sizes})


def _write(directory: Path, name: str) -> None:
    recipe = family.load(name)
    tokenizer = words.tokenizer(recipe)
    tokenizer.save_pretrained(directory)
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in recipe.special}
    model = weights.random(recipe, ids, len(tokenizer), words.output_scales(tokenizer.get_vocab(), recipe))
    recipe.save(model, directory)
    for file, content in recipe.processors.items():
        _write_json(directory / file, content)
    generation = {"eos_token_id": ids[recipe.end], "pad_token_id": ids[recipe.pad], "do_sample": False}
    _write_json(directory / "generation_config.json", generation)
    written = sorted(path for path in directory.rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): path.stat().st_size for path in written}
    _write_json(directory / _MARKER, {"recipe": _recipe(name), "files": files})


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
