"""What an API process holds, from its first connection to its last."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from redis.exceptions import RedisError

from api import metrics
from api.adapters import Adapters
from api.grammars import Grammars
from api.intake import Intake
from api.media_desk import MediaDesk
from api.pipeline import Pipeline
from api.stored import Background, ResponseStore
from api.vllm_serving import Serving
from app import keys
from app.adapter_registry import AdapterRegistry
from app.fleet import FleetView
from app.items.index import ItemIndex
from app.media import fingerprint
from app.redis import connect, refuse_unsafe_broker, wait_until_up
from app.registry import Registry
from app.roles import Role
from app.routing import RedisRouter, Reservations
from app.sender import TaskSender
from app.settings import Settings
from app.streaming import TokenReader

log = logging.getLogger(__name__)

#: How long an API process that ends tries to tell Redis so.
LAST_WORDS_S = 2.0


class Services:
    """The parts that routes use. Made by `running`."""

    serving: Serving
    """From `start` on."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        timeout = settings.redis.timeout_s
        self.cache = connect(settings.redis.cache, timeout, name=f"trivet-api-{self.id}")
        self.broker = connect(settings.redis.broker_url, timeout, name=f"trivet-api-{self.id}-send", connections=8)
        self.reader = TokenReader(self.cache, self.id, settings.stream.replay_batches)
        self.fleet = FleetView(
            Registry(self.cache, settings.worker.lease_s),
            settings.served_name,
            lambda gone: self.pipeline.worker_lost(gone),
            settings.worker.heartbeat_s,
        )
        self.fingerprint = fingerprint.of_settings(settings) if settings.enable_multimodal else ""
        items = ItemIndex(self.cache, self.fingerprint, settings.items)
        self.pipeline = Pipeline(
            self.id,
            settings.served_name,
            self.fleet,
            RedisRouter(self.cache, settings.routing, settings.items.encode_timeout_s),
            Reservations(self.cache, settings.api.lease_s),
            TaskSender(self.broker),
            self.reader,
            items,
            self.cache,
            settings.api.migration_limit,
        )
        self.adapters = Adapters(AdapterRegistry(self.cache, settings.served_name), self.fleet, settings)
        self.media = MediaDesk(settings, self.id, self.cache, items, self.fleet) if settings.enable_multimodal else None
        self.intake = Intake(settings, self.media.sources if self.media else None)
        self.grammars = Grammars(settings)
        self.store = ResponseStore(self.cache, self.id, settings.api) if settings.api.response_store_ttl_s else None
        self.background = Background(self.cache)
        self.in_flight = 0
        self._strangers: set[str] = set()
        self._background: list[asyncio.Task[None]] = []

    async def check_redis(self) -> None:
        """Raises RedisUnavailable or UnsafeBroker."""
        await wait_until_up(self.broker, self.settings.redis)
        await wait_until_up(self.cache, self.settings.redis)
        await refuse_unsafe_broker(self.broker, self.settings.redis.broker_url)

    async def start(self) -> None:
        await self.check_redis()
        if self.media is not None:
            await self.media.start()
        # Not in a thread: vLLM's config and renderer belong to the thread that uses them.
        self.serving = Serving(self.settings, self.pipeline, self.grammars.known)
        await self._announce()
        self._background = [
            self._spawn(self._heartbeat()),
            self._spawn(self.reader.run()),
            self._spawn(self.fleet.run()),
        ]
        if self.media is not None:
            self._background.append(self._spawn(self.media.keep_offered()))
        if self.store is not None:
            self._background.append(self._spawn(self.background.listen()))
        await asyncio.wait_for(self.reader.subscribed.wait(), self.settings.redis.timeout_s)
        await self.fleet.refresh()

    async def stop(self) -> None:
        """Also after a `start` that failed on the way. Whatever fails here, the rest is done."""
        async with AsyncExitStack() as last:
            last.push_async_callback(self.broker.aclose)
            last.push_async_callback(self.cache.aclose)
            if self.media is not None:
                last.push_async_callback(self.media.close)
            if hasattr(self, "serving"):
                last.callback(self.serving.shutdown)
            last.push_async_callback(self.grammars.close)
            last.push_async_callback(self._leave)
            last.push_async_callback(self.pipeline.settle, 2.0)
            last.push_async_callback(self.background.stop)

    async def _leave(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        with suppress(RedisError, OSError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.cache.delete(keys.api(self.id), keys.replay(self.id))
                await self.pipeline.leave()

    async def _announce(self) -> None:
        record = {
            "id": self.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "in_flight": self.in_flight,
            "at": time.time(),
        }
        await self.cache.set(keys.api(self.id), json.dumps(record), px=int(self.settings.api.lease_s * 1000))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.settings.api.lease_s / 4)
            self._look_for_strangers()
            self.measure()
            try:
                await self._announce()
                await self.pipeline.keep_reservations()
            except (RedisError, OSError) as error:
                log.warning("heartbeat not delivered: %s", error)

    def measure(self) -> None:
        """Bring what is counted elsewhere into the metrics."""
        for role in Role:
            metrics.WORKERS.labels(role.value).set(sum(role in worker.roles for worker in self.fleet.now.workers))
        metrics.TOKEN_GAPS.set(self.reader.gaps)
        if self.media is not None:
            self.media.measure()

    def _look_for_strangers(self) -> None:
        """Workers that name media otherwise, which costs every item a second encode: say so once."""
        for worker in self.fleet.now.workers:
            if worker.fingerprint in ("", self.fingerprint) or worker.incarnation in self._strangers:
                continue
            self._strangers.add(worker.incarnation)
            log.warning(
                "worker %s has other processor settings or another model than this API (engine.args, model): it "
                "does not encode for the requests that come here",
                worker.id,
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._must_not_end)
        return task

    def _must_not_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        # Without its reader or its view of the fleet the process would answer nothing: better to be started anew.
        log.critical("a background task of the API ended, and the process with it: %r", task.exception())
        if self.media is not None:
            self.media.remove()
        os._exit(70)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Services]:
    services = Services(settings)
    try:
        await services.start()
        yield services
    finally:
        await services.stop()
