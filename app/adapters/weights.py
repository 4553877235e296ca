"""`adapter_model.safetensors`: its header, and whether its tensors are those that the configuration tells of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from app.adapters.base import AdapterRefused
from app.adapters.config import AdapterConfig
from app.adapters.intake import WEIGHTS

#: Of a module's weight: (outputs, inputs).
Shape = tuple[int, int]

PREFIX = "base_model.model."
#: The base model's own weights, which PEFT saves with those of an embedding, and vLLM skips.
OF_THE_BASE = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
TYPES = ("F64", "F32", "F16", "BF16")
SHOWN = 5
#: A large model of experts has some 90 000, when each expert is adapted by itself.
MAX_TENSORS = 1 << 17
MAX_NAME = 512
#: Patterns of ranks and alphas, times the tensors that each is matched with.
MAX_MATCHES = 1 << 20

#: End of a tensor's name -> which of the two factors it is, and the dimension that is the rank.
_FACTORS = {
    ".lora_A.weight": ("A", 0),
    ".lora_B.weight": ("B", 1),
    ".lora_embedding_A": ("A", 0),
    ".lora_embedding_B": ("B", 1),
}


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_modules(folder: Path, config: AdapterConfig) -> dict[str, Shape | None]:
    """The full names of the modules that the adapter changes, as in the checkpoint, and the shapes of the changes.

    No shape is told of embeddings, which have it the other way round, and of experts, which may be stacked.

    Raises AdapterRefused for a file that is truncated or is no safetensors file, and for tensors that are not the two
    factors of each module, of its rank.
    """
    modules: dict[str, dict[str, _Tensor]] = {}
    for tensor in _tensors(folder / WEIGHTS, config.patterns):
        if tensor.name.endswith(OF_THE_BASE):
            continue
        module, factor = _checked(tensor, config)
        modules.setdefault(module, {})[factor] = tensor
    if not modules:
        raise _wrong("it has no tensors of a LoRA adapter")
    if incomplete := [module for module, factors in modules.items() if len(factors) < 2]:
        raise _wrong(f"one of the two factors is missing of {listed(incomplete)}")
    return {module: _shape(module, factors["A"], factors["B"]) for module, factors in modules.items()}


def listed(names: Collection[str]) -> str:
    shown = ", ".join(ascii(one[:100])[1:-1] for one in sorted(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _tensors(path: Path, patterns: int) -> list[_Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        # It checks the header against the file's size: lengths, types, shapes, offsets, and that there are no holes.
        with safe_open(path, framework="np") as file:
            names = [*file.keys()]
            _check_names(names, patterns)
            slices = {name: file.get_slice(name) for name in names}
            return [_Tensor(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()]
    except (SafetensorError, ValueError, OverflowError) as error:
        raise _wrong(f"it is truncated, or no safetensors file ({error})") from None


def _check_names(names: list[str], patterns: int) -> None:
    if len(names) > MAX_TENSORS:
        raise _wrong(f"it has {len(names)} tensors, and {MAX_TENSORS} is most")
    if len(names) * patterns > MAX_MATCHES:
        raise _wrong(f"it has {len(names)} tensors, which are too many for {patterns} patterns of ranks and alphas")
    if long := [name for name in names if len(name) > MAX_NAME]:
        raise _wrong(f"{listed(long)}: names of more than {MAX_NAME} characters")


def _checked(tensor: _Tensor, config: AdapterConfig) -> tuple[str, str]:
    """(module, factor) that the tensor is."""
    end = next((one for one in _FACTORS if tensor.name.endswith(one)), None)
    if end is None:
        raise _wrong(f"{listed([tensor.name])} is no tensor of a LoRA adapter")
    if tensor.dtype not in TYPES:
        raise _wrong(f"{listed([tensor.name])} is of type {tensor.dtype}, and must be one of {', '.join(TYPES)}")
    module = tensor.name.removeprefix(PREFIX).removesuffix(end)
    factor, dimension = _FACTORS[end]
    rank = config.rank_of(module)
    # A tensor of fused experts has those of all of them in it.
    fits = ".experts" in module or tensor.shape[dimension : dimension + 1] == (rank,)
    if len(tensor.shape) != 2 or 0 in tensor.shape or not fits:
        raise _wrong(f"{listed([tensor.name])} has shape {list(tensor.shape)}, and is no factor of rank {rank}")
    return module, factor


def _shape(module: str, a: _Tensor, b: _Tensor) -> Shape | None:
    if "embedding" in a.name.removeprefix(PREFIX).removeprefix(module) or ".experts" in module:
        return None
    return b.shape[0], a.shape[1]


def _wrong(what: str) -> AdapterRefused:
    return AdapterRefused(f"{WEIGHTS}: {what}")
