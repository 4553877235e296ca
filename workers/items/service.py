"""All that a worker with media needs for its items, started and stopped with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from app.errors import BrokerUnavailable
from app.fleet import FleetView
from app.items.announcements import Announcements
from app.items.index import ItemIndex
from app.media import fingerprint
from app.messages import Assignment
from app.registry import Registry
from app.roles import Role
from app.sender import TaskSender
from app.settings import Settings
from app.tensors import folder
from app.tensors.plane import TensorPlane
from workers.embeddings.store import EmbeddingStore
from workers.engine import Engine
from workers.items.encoder import ItemEncoder, ItemSource
from workers.items.finder import ItemFinder
from workers.items.local import LocalItems
from workers.items.prompt import PromptItems
from workers.items.self_check import learn_widths
from workers.metrics import ItemMetrics

log = logging.getLogger(__name__)

#: How long a worker that ends waits for what it was about to tell others.
LAST_WORDS_S = 1.0


def wanted(settings: Settings) -> bool:
    """Whether a worker with these settings encodes or receives embeddings. One that only decodes does neither."""
    return settings.enable_multimodal and bool({Role.ENCODE, Role.PREFILL} & settings.roles)


class Shelf:
    """The shared memory of a worker's embeddings. Made before the engine, which writes into it and reads from it."""

    def __init__(self, settings: Settings, worker_id: str) -> None:
        capacity = int(settings.multimodal_embedding_cache_capacity_gb * 1e9)
        root = Path(settings.tensors.directory)
        folder.check_room(root, capacity, "multimodal_embedding_cache_capacity_gb")
        self.folder = folder.make_folder(root, worker_id)
        self.store = EmbeddingStore(self.folder.path / "embeddings", capacity)

    @property
    def embeddings(self) -> Path | None:
        """Where the engine's connector finds them; None when none are kept."""
        return self.store.directory if self.store.capacity else None

    def close(self) -> None:
        self.store.clear()
        self.folder.remove()


class ItemService:
    """`prompts` gets prompts ready, `encoder` and `local` are what an encode task needs."""

    def __init__(
        self,
        settings: Settings,
        me: Assignment,
        engine: Engine,
        shelf: Shelf,
        redis: Any,
        sender: TaskSender,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        self.fingerprint = fingerprint.of_settings(settings)
        self.index = ItemIndex(redis, self.fingerprint, settings.items)
        self.plane = TensorPlane(shelf.store.directory, settings.tensors, settings.engine.nixl_progress_delay_us)
        self._engine = engine
        self._shelf = shelf
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False
        self._registry, self._metrics = metrics, ItemMetrics(self)
        self._announcements = Announcements(redis)
        self._fleet = FleetView(
            Registry(redis, settings.worker.lease_s),
            settings.served_name,
            lambda _gone: self._announcements.wake(),
            settings.worker.heartbeat_s,
        )
        self.local = LocalItems(me, shelf.store, self.plane, self.index, settings.items.record_ttl_s, self._spawn)
        source = ItemSource(settings.model, engine.renderer.revision, engine.renderer.processor_settings)
        self.encoder = ItemEncoder(me, engine, self.plane, self.local, self.index, source, self._spawn)
        self.finder = ItemFinder(
            me,
            self.encoder,
            self.local,
            self.index,
            self._announcements,
            lambda: self._fleet.now,
            sender,
            settings.items.encode_timeout_s,
            Role.ENCODE in settings.roles,
        )
        self.prompts = PromptItems(engine.renderer, self.encoder, self.finder, self.local)

    async def start(self) -> list[Coroutine[Any, Any, None]]:
        """Check the model and the way through the engine; answers what has to run from now on."""
        try:
            await self.plane.start()
            # Without a cache there is nowhere to hold what a prompt from records relies on.
            if self._shelf.embeddings is not None and await self._engine.renderer.spliceable():
                self.encoder.widths = await learn_widths(self._engine, self._shelf.store)
                self.prompts.spliceable = True
            await self._fleet.refresh()
        except BaseException:
            self._shelf.close()
            raise
        self._registry.register(self._metrics)
        return [self._announcements.run(), self._fleet.run()]

    async def close(self) -> None:
        """After `start` only. Whatever goes wrong on the way, no shared memory is left."""
        self._registry.unregister(self._metrics)
        try:
            await self._take_leave()
            await self.plane.close()
        finally:
            self._shelf.close()

    async def _take_leave(self) -> None:
        """Say what is still to be said, and then that nothing is here any more."""
        if self._running:
            await asyncio.wait(self._running, timeout=LAST_WORDS_S)
        self._closed = True
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        try:
            await self.local.close()
        except BrokerUnavailable as error:
            log.warning("the index keeps entries of this worker until somebody finds them stale: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            return work.close()
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work on items failed", exc_info=error)
