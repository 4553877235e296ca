"""Whether the files in a folder are an adapter that an engine can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.adapters.base import AdapterRefused
from app.adapters.base_model import check_base, refuse_encoders
from app.adapters.config import read_config
from app.adapters.intake import FILES
from app.adapters.weights import read_modules


@dataclass(frozen=True)
class Facts:
    """What the files say. `rank` is the largest of the modules', `size` in bytes, and `modules` full names."""

    rank: int
    size: int
    modules: frozenset[str]


def verify(folder: Path, *, max_rank: int, base_model: str | None = None) -> Facts:
    """Read the headers. Raises AdapterRefused, which says what is wrong with which file.

    With `base_model`, a checkpoint's folder or name, every module that the adapter changes must be in there, and of the
    same shape.
    """
    config = read_config(folder)
    if config.rank > max_rank:
        raise AdapterRefused(f"the adapter's rank is {config.rank}, and the engine's --max-lora-rank is {max_rank}")
    modules = read_modules(folder, config)
    refuse_encoders(modules)
    if base_model is not None:
        check_base(modules, base_model)
    return Facts(config.rank, sum((folder / name).stat().st_size for name in FILES), frozenset(modules))
