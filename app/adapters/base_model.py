"""Whether an adapter is for the model that is served, by the names and shapes of the model's own weights.

vLLM looks at the ends of modules' names alone. It passes over modules that the model does not have, layers behind its
last one say, and over those of media encoders; and it lays factors that are too small into the places of larger ones.
Such an adapter would run, and not be itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from app.adapters.base import AdapterRefused
from app.adapters.weights import Shape, listed

log = logging.getLogger(__name__)

#: Parts of names that transformers, vLLM and published checkpoints place differently.
WRAPPERS = frozenset({"model", "language_model", "thinker"})
#: What the names of media encoders, and of what lies between them and the language model, begin with.
ENCODERS = re.compile(r"(vis|image|audio|speech|sound|multi_modal|mm_|connector|aligner|merger)")
#: Types whose tensors have a weight's own shape: others pack it.
WHOLE = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def refuse_encoders(modules: Mapping[str, Shape | None]) -> None:
    """Raise AdapterRefused for modules that encode media: no engine is told to adapt them."""
    if found := [one for one in modules if ENCODERS.match(_plain(one))]:
        raise AdapterRefused(f"the adapter changes {listed(found)}, and only the language model can be adapted")


def check_base(modules: Mapping[str, Shape | None], model: str) -> None:
    """Raise AdapterRefused for modules that the checkpoint does not have, or has in other shapes.

    `model` is its folder, or a name on the hub, if it is in the hub's cache here. A module is missing if others of its
    kind, in other layers, are there. Of a kind that has another name in the checkpoint nothing is known.
    """
    folder = _folder(model)
    weights = {} if folder is None else _shapes(folder)
    if not weights:
        log.warning("no safetensors of %s are here: adapters are not compared with it", model)
    kinds = {_kind(name) for name in weights}
    plain = {module: _plain(module) for module in modules}
    if absent := [one for one, name in plain.items() if name not in weights and _kind(name) in kinds]:
        raise AdapterRefused(f"the model has no {listed(absent)}: the adapter is for another one")
    for module, name in plain.items():
        shape, own = modules[module], weights.get(name)
        if shape is not None and own is not None and shape != own:
            raise AdapterRefused(
                f"{listed([module])} has {own[1]} inputs and {own[0]} outputs in the model, and {shape[1]} and "
                f"{shape[0]} in the adapter, which is for another one"
            )


def _folder(model: str) -> Path | None:
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _shapes(model: Path) -> dict[str, Shape | None]:
    """Of each module with weights, by its name without wrappers: (outputs, inputs); None where these are packed."""
    from safetensors import safe_open

    found: dict[str, Shape | None] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                module, _, kind = name.rpartition(".")
                if kind not in ("weight", "qweight", "weight_packed"):
                    continue
                tensor = file.get_slice(name)
                shape = tuple(tensor.get_shape())
                is_whole = kind == "weight" and len(shape) == 2 and tensor.get_dtype() in WHOLE
                found[_plain(module)] = (shape[0], shape[1]) if is_whole else None
    return found


def _plain(module: str) -> str:
    return ".".join(part for part in module.split(".") if part not in WRAPPERS)


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)
