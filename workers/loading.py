"""What a worker loads before it takes tasks: its engine, and around it what gets prompts ready for that."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.fleet import FleetView
from app.messages.plans import Assignment
from app.registry import Registry
from app.roles import Does
from app.sender import TaskSender
from app.settings import Settings
from workers.engine import Engine
from workers.items.memory import EmbeddingMemory
from workers.items.ready import Prompts, TextPrompts
from workers.items.service import ItemService
from workers.kv_events.service import KVEvents
from workers.preflight import MisconfiguredWorker


@dataclass
class Loaded:
    """`items` is None where no embeddings are handled. `work` has to run from now on."""

    engine: Engine
    prompts: Prompts
    fleet: FleetView
    items: ItemService | None
    work: list[Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Loader:
    """Loads for the worker `me`, on the loop that will run its stages, which the engine blocks meanwhile."""

    settings: Settings
    me: Assignment
    registry: Registry
    cache: Any
    sender: TaskSender

    async def load(self, does: Does, memory: EmbeddingMemory | None, kv_events: KVEvents | None) -> Loaded:
        """`memory` is there if embeddings are handled, and `kv_events` if they are published. Raises
        MisconfiguredWorker for a model that is not served, and what vLLM raises."""
        sockets = kv_events.sockets if kv_events is not None else None
        if memory is not None:
            loaded = await self._with_items(memory, sockets)
        else:
            loaded = await self._text_alone(does, sockets)
        if kv_events is not None:
            loaded.engine.reporting = kv_events.reporting
            loaded.work += kv_events.start(loaded.engine.kv_event_sources, loaded.engine.event_block_size)
        return loaded

    async def _with_items(self, memory: EmbeddingMemory, sockets: Path | None) -> Loaded:
        try:
            engine = Engine(self.settings, memory.embeddings, sockets)
            items = ItemService(self.settings, self.me, engine, memory, self.cache, self.sender)
            work = await items.start()
        except BaseException:
            memory.close()
            raise
        return Loaded(engine, items.prompts, items.fleet, items, work)

    async def _text_alone(self, does: Does, sockets: Path | None) -> Loaded:
        engine = Engine(self.settings, None, sockets)
        fleet = await self._fleet()
        if does is Does.EMBED and not await engine.embeds():
            raise MisconfiguredWorker("the model classifies or ranks; of pooling models those are served that embed")
        return Loaded(engine, TextPrompts(engine.renderer), fleet, None, [fleet.run()])

    async def _fleet(self) -> FleetView:
        """A worker without items sees its fleet by itself: it may have to choose who decodes."""
        settings = self.settings
        fleet = FleetView(self.registry, settings.served_name, lambda _gone: None, settings.worker.heartbeat_s)
        await fleet.refresh()
        return fleet
