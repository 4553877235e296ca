"""Whether an adapter is for the model that is served, by the names and shapes of the model's own weights.

vLLM looks at the ends of modules' names alone. It passes over modules that the model does not have, those of another
architecture say, or of layers behind the last one, and over those of media encoders; and it lays factors that are too
small into the places of larger ones. Such an adapter would run, and not be itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.adapters.base import AdapterRefused
from app.adapters.vllm_names import VllmNames
from app.adapters.weights import Shape, listed

#: Parts of names that transformers, vLLM and published checkpoints place differently.
WRAPPERS = frozenset({"model", "language_model", "thinker"})
#: What the names of media encoders, and of what lies between them and the language model, begin with.
ENCODERS = re.compile(
    r"vi[st]|image|audio|speech|sound|whisper|sam_model|vpm|apm|encoder\.|transformer\.vision|"
    r"multi_?modal|mm_|connector|aligner|merger|resampler|qformer|mlp1|mlp_AR|linear_proj|"
    r"((language|layerwise|spatial)_)?project(or|ion)|embed_(vision|audio|image|tokens_extend)"
)
#: Types whose tensors have a weight's own shape: others pack it.
WHOLE = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
EXPERTS = ".experts"


def refuse_encoders(modules: Mapping[str, Shape | None]) -> None:
    """Raise AdapterRefused for modules that encode media: no engine is told to adapt them."""
    if found := [one for one in modules if ENCODERS.match(_plain(one))]:
        raise AdapterRefused(f"the adapter changes {listed(found)}, and only the language model can be adapted")


def check_base(modules: Mapping[str, Shape | None], model: str) -> None:
    """Raise AdapterRefused for modules that the checkpoint does not have, or has in other shapes, under the names that
    vLLM maps both to; and for every adapter if there are no safetensors to compare it with.

    `model` is the checkpoint's folder, or a name on the hub, if it is in the hub's cache here.
    """
    folder = _folder(model)
    if folder is None or not any(folder.glob("*.safetensors")):
        raise AdapterRefused(
            "no safetensors of the served model are on a worker's host, in its folder or in the hub's cache, so that "
            "adapters cannot be compared with it"
        )
    names = VllmNames.of(folder)
    weights = _shapes(folder, names)
    mapped = {module: names.adapted(module) for module in modules}
    if absent := [module for module, name in mapped.items() if name not in weights]:
        raise AdapterRefused(f"the model has no {listed(absent)}: the adapter is for another one")
    for module, name in mapped.items():
        shape, own = modules[module], weights[name]
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


def _shapes(model: Path, names: VllmNames) -> dict[str, Shape | None]:
    """Of each module with weights, by the name that vLLM maps it to: (outputs, inputs); None where these are packed."""
    from safetensors import safe_open

    found: dict[str, Shape | None] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for tensor in file.keys():  # noqa: SIM118 (it is no mapping)
                module, _, kind = tensor.rpartition(".")
                if (name := names.loaded(module)) is None:
                    continue
                for one in (name, *_fused(name)):
                    found.setdefault(one, None)
                if kind == "weight":
                    found[name] = _shape(file.get_slice(tensor))
    return found


def _shape(tensor: Any) -> Shape | None:
    shape = tuple(tensor.get_shape())
    return (shape[0], shape[1]) if len(shape) == 2 and tensor.get_dtype() in WHOLE else None


def _fused(module: str) -> tuple[str, ...]:
    """The modules that PEFT has for all experts at once, one for each of their two weights."""
    whole, of_experts, _ = module.partition(EXPERTS)
    return (f"{whole}{EXPERTS}", f"{whole}{EXPERTS}.base_layer") if of_experts else ()


def _plain(module: str) -> str:
    return ".".join(part for part in module.split(".") if part not in WRAPPERS)
