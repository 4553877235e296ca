"""All that a worker with media needs for its items, started and stopped with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from app.errors.serving import BrokerUnavailable
from app.fleet import FleetView
from app.items.announcements import Announcements
from app.items.index import ItemIndex
from app.media import fingerprint
from app.messages.media import Modality
from app.messages.plans import Assignment
from app.registry import Registry
from app.roles import Role
from app.sender import TaskSender
from app.settings import Settings
from app.tensors.plane import TensorPlane
from workers.engine import Engine
from workers.items import untaken
from workers.items.encoder import ItemEncoder, ItemSource
from workers.items.finder import ItemFinder
from workers.items.local import LocalItems
from workers.items.memory import EmbeddingMemory
from workers.items.prompt import PromptItems
from workers.items.self_check import EncoderBroken, learn_widths
from workers.metrics import ItemMetrics

log = logging.getLogger(__name__)

#: How long a worker that ends waits for what it was about to tell others.
LAST_WORDS_S = 1.0


def wanted(settings: Settings) -> bool:
    """Whether a worker with these settings encodes or receives embeddings. One that only decodes does neither."""
    return settings.enable_multimodal and bool({Role.ENCODE, Role.PREFILL} & settings.roles)


class ItemService:
    """`prompts` gets prompts ready, `encoder` and `local` are what an encode task needs."""

    def __init__(
        self,
        settings: Settings,
        me: Assignment,
        engine: Engine,
        memory: EmbeddingMemory,
        redis: Any,
        sender: TaskSender,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        self.fingerprint = fingerprint.of_settings(settings)
        self.index = ItemIndex(redis, self.fingerprint, settings.items)
        self.plane = TensorPlane(memory.store.directory, settings.tensors, settings.engine.nixl_progress_delay_us)
        self._me = me
        self._prefills = Role.PREFILL in settings.roles
        self._engine = engine
        self._memory = memory
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False
        self._registry, self._metrics = metrics, ItemMetrics(self)
        self._announcements = Announcements(redis)
        self.fleet = FleetView(
            Registry(redis, settings.worker.lease_s),
            settings.served_name,
            lambda _gone: self._announcements.wake(),
            settings.worker.heartbeat_s,
        )
        self.local = LocalItems(
            me, memory.store, self.plane, self.index, settings.items.record_ttl_s, self._spawn, self._alive
        )
        source = ItemSource(settings.model, engine.renderer.revision, engine.renderer.processor_settings)
        self.encoder = ItemEncoder(me, engine, self.plane, self.local, self.index, source, settings.media, self._spawn)
        self.finder = ItemFinder(
            me,
            self.encoder,
            self.local,
            self.index,
            self._announcements,
            self.fleet,
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
            if self._memory.embeddings is not None and await self._engine.renderer.spliceable():
                await self._learn_widths()
            await self.fleet.refresh()
        except BaseException:
            await self._end_work()
            self._memory.close()
            raise
        self._registry.register(self._metrics)
        return [
            self._announcements.run(),
            self.fleet.run(),
            self.local.published.keep_renewed(),
            untaken.watch(self.local.room, self.index, self._me.worker),
        ]

    async def _learn_widths(self) -> None:
        """A worker that prefills can do without embeddings of its encoder; one that only encodes cannot."""
        try:
            self.encoder.widths = await learn_widths(self._engine, self._memory.store)
        except EncoderBroken as error:
            if not self._prefills:
                raise
            log.error("prompts with media are rendered whole, and no embedding is kept or shared: %s", error)
        else:
            self.prompts.spliceable = True

    @property
    def placeholders(self) -> dict[Modality, list[int]]:
        """What stands for an item of each modality, where prompts are put together from records."""
        return {modality: list(one.target) for modality, one in self.encoder.widths.items() if one.target}

    async def _alive(self, worker: Assignment) -> bool:
        return await self.finder.alive(worker)

    async def close(self) -> None:
        """After `start` only. Whatever goes wrong on the way, no shared memory is left."""
        self._registry.unregister(self._metrics)
        try:
            await self._take_leave()
            await self.plane.close()
        finally:
            self._memory.close()

    async def _take_leave(self) -> None:
        """Say what is still to be said, and then that nothing is here any more."""
        if self._running:
            await asyncio.wait(self._running, timeout=LAST_WORDS_S)
        await self._end_work()
        try:
            await self.local.close()
        except BrokerUnavailable as error:
            log.warning("the index keeps entries of this worker until somebody finds them stale: %s", error)

    async def _end_work(self) -> None:
        self._closed = True
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

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
