"""Adapter to vLLM: the LoRA adapters that its engine holds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from app.adapter_registry import lora_number
from app.adapters import Adapter, AdapterRefused
from app.errors.adapters import AdapterMissing
from app.errors.serving import WorkerLost
from workers.vllm_errors import clean

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """vLLM's `--max-lora-rank`, `--max-loras` (adapters that run at once) and `--max-cpu-loras` (that are held)."""

    max_rank: int
    running: int
    held: int


class Loras(Protocol):
    """What an engine does with adapters (see EngineLoras)."""

    @property
    def limits(self) -> Limits | None: ...
    async def add(self, adapter: Adapter) -> None: ...
    async def remove(self, adapter: str) -> None: ...


class EngineLoras:
    """`llm` is an AsyncLLM. What is not in here runs for nobody.

    Adapters are not pinned: vLLM would give each a place among those that run at once, for ever, and with all of these
    taken any other adapter's request kills the engine. One that is held is never evicted while there are at most
    `Limits.held`, which the caller sees to.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        #: Those that were used last at the end.
        self._requests: dict[str, LoRARequest] = {}

    @property
    def resident(self) -> list[str]:
        """Ids of the adapters that need not be brought to the device: vLLM leaves those there that were used last."""
        limits = self.limits
        return sorted([*self._requests][-limits.running :]) if limits else []

    @property
    def limits(self) -> Limits | None:
        """None for an engine that was started without `--enable-lora`."""
        config = self._llm.vllm_config.lora_config
        if config is None:
            return None
        return Limits(int(config.max_lora_rank), int(config.max_loras), int(config.max_cpu_loras or config.max_loras))

    async def add(self, adapter: Adapter) -> None:
        """Raises AdapterRefused when the engine cannot take it, and WorkerLost."""
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        number = lora_number(adapter.id)
        if any(one.lora_int_id == number for one in self._requests.values()):
            raise AdapterRefused(
                f"{adapter.id} has the same number in the engine as another adapter; change its content"
            )
        request = LoRARequest(lora_name=adapter.id, lora_int_id=number, lora_path=adapter.path)
        try:
            await self._llm.add_lora(request)
        except EngineDeadError as error:
            raise WorkerLost("the worker's engine died") from error
        except Exception as error:
            await self._forget(number)
            raise AdapterRefused(f"the engine refused the adapter: {clean(error)}") from error
        self._requests[adapter.id] = request

    async def remove(self, adapter: str) -> None:
        """Let the adapter of this id go. Nothing may run with it any more: vLLM would load it again."""
        await self._forget(self._requests.pop(adapter).lora_int_id)

    async def _forget(self, number: int) -> None:
        """An engine that died holds nothing; any other trouble is in the log, and costs a place for an adapter."""
        try:
            await self._llm.remove_lora(number)
        except Exception as error:
            log.error("the engine did not let an adapter go: %s", error)

    async def numbers(self) -> set[int]:
        """What the engine says that it holds."""
        return set(await self._llm.list_loras())

    def request(self, adapter: str) -> LoRARequest | None:
        """What goes with a request; None for the model itself. Raises AdapterMissing."""
        if not adapter:
            return None
        try:
            request = self._requests.pop(adapter)
        except KeyError:
            raise AdapterMissing("the worker's engine does not hold the adapter of the request") from None
        self._requests[adapter] = request
        return request
