"""Adapter to vLLM: how its serving code comes to know the adapter that a request names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelPermission
from vllm.lora.request import LoRARequest

from api import context
from app.adapter_registry import Published, lora_number


class CurrentAdapter(Mapping[str, LoRARequest]):
    """In the place of vLLM's table of adapters, which each API process would have to keep up to date: the one that the
    current request was found to name. It goes by that name in answers; the pipeline knows the adapter itself."""

    def __getitem__(self, name: str) -> LoRARequest:
        adapter = context.adapter()
        if adapter is None or adapter.name != name:
            raise KeyError(name)
        return LoRARequest(lora_name=name, lora_int_id=lora_number(adapter.id), lora_path=adapter.id)

    def __iter__(self) -> Iterator[str]:
        adapter = context.adapter()
        return iter(() if adapter is None else (adapter.name,))

    def __len__(self) -> int:
        return int(context.adapter() is not None)


class Models(OpenAIServingModels):
    """vLLM's models: the one that is served, and the request's adapter."""

    def __init__(self, client: Any, name: str, path: str) -> None:
        super().__init__(client, [BaseModelPath(name=name, model_path=path)])
        self.lora_requests = CurrentAdapter()  # it is only read

    async def listing(self, adapters: list[Published]) -> Any:
        """A ModelList with all adapters."""
        found = await self.registry.show_available_models()
        parent = self.base_model_paths[0].name
        for one in adapters:
            card = ModelCard(id=one.name, root=one.id, parent=parent, permission=[ModelPermission()])
            found.data.append(card)
        return found
