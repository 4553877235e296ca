"""Adapter to vLLM: what it makes of modules' names, those of an adapter's and those of a checkpoint's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.adapters.base import AdapterRefused


@dataclass(frozen=True)
class VllmNames:
    """By the `hf_to_vllm_mapper` of the model's class; without one a name stays as it is.

    A module of an adapter is applied to the module that has its name after the mapping, or to none at all.
    """

    mapper: Any

    @classmethod
    def of(cls, model: Path) -> VllmNames:
        """For the checkpoint in this folder. Raises AdapterRefused if vLLM has no class of its own for it."""
        from vllm.model_executor.models.registry import ModelRegistry

        for architecture in _architectures(model / "config.json"):
            if (known := ModelRegistry.models.get(architecture)) is not None:
                return cls(getattr(known.load_model_cls(), "hf_to_vllm_mapper", None))
        raise AdapterRefused("vLLM has no class for the served model, so that adapters cannot be compared with it")

    def adapted(self, module: str) -> str:
        """As `vllm.lora.utils.parse_fine_tuned_lora_name` has it, of a name without `base_model.model.`"""
        if self.mapper is None:
            return module
        end = ".lora_A.weight"
        return str(self.mapper.get_rename_mapper().map_name(module + end)).removesuffix(end)

    def loaded(self, module: str) -> str | None:
        """Of a module with weights in the checkpoint; None for one that is not loaded."""
        if self.mapper is None:
            return module
        if self.mapper.map_name(f"{module}.weight") is None:
            return None
        return str(self.mapper.get_rename_mapper().map_name(f"{module}.weight")).removesuffix(".weight")


def _architectures(config: Path) -> list[str]:
    try:
        found = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return []
    return [*(found.get("architectures") or ())] if isinstance(found, dict) else []
