"""What a worker process holds: one engine, its connections, its registration, and the requests in flight."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from app import cancellation, garbage
from app.adapter_registry import AdapterRegistry
from app.fleet import FleetView
from app.messages.plans import Assignment
from app.messages.tasks import StageTask, Task
from app.redis import connect, redacted, refuse_unsafe_broker, wait_until_up
from app.registry import Registry, WorkerRecord
from app.roles import Does, Role
from app.routing import RedisRouter, Reservations, Router
from app.sender import TaskSender
from app.settings import Settings
from app.streaming import TokenWriter
from workers import kv_budget, metrics, model_kind
from workers.adapters import Adapters
from workers.engine import Engine
from workers.items.ready import Prompts
from workers.jobs import Jobs
from workers.kv_budget import KVBudget
from workers.kv_events import service as kv_events
from workers.kv_events.service import KVEvents
from workers.preflight import MisconfiguredWorker, check, check_blocks
from workers.supervisor import Supervisor

if TYPE_CHECKING:
    from workers.items.memory import EmbeddingMemory
    from workers.items.service import ItemService

log = logging.getLogger(__name__)

#: How long a worker that ends tries to be heard: out of the registry, and the last tokens out.
LAST_WORDS_S = 4.0
#: Longest end of what it has for its items.
ITEMS_S = 4.0


class Host:
    """Everything that the stages of this process share. Made by `start`, on the loop that runs them."""

    does: Does = Does.GENERATE
    engine: Engine
    fleet: FleetView
    budget: KVBudget
    prompts: Prompts
    items: ItemService | None = None
    kv_events: KVEvents | None = None
    adapters: Adapters | None = None
    """None where no language model runs."""
    _memory: EmbeddingMemory | None = None

    def __init__(self, settings: Settings, worker_id: str, concurrency: int) -> None:
        self.settings = settings
        self.id = worker_id
        self.incarnation = uuid.uuid4().hex[:12]
        self.me = Assignment(worker=worker_id, incarnation=self.incarnation)
        self.concurrency = concurrency
        timeout = settings.redis.timeout_s
        self.cache = connect(settings.redis.cache, timeout, name=f"trivet-{worker_id}")
        self.broker = connect(settings.redis.broker_url, timeout, name=f"trivet-{worker_id}-send", connections=4)
        self.registry = Registry(self.cache, settings.worker.lease_s)
        self.sender = TaskSender(self.broker)
        self.router: Router = RedisRouter(self.cache, settings.routing, settings.items.encode_timeout_s)
        self.reservations = Reservations(self.cache, settings.api.lease_s)
        self.jobs = Jobs()
        self.tokens = TokenWriter(
            self.cache, worker_id, self.incarnation, settings.stream.replay_batches, self.jobs.cancel_of
        )
        self.supervisor = Supervisor(worker_id)
        self.draining = False
        self._announcing = asyncio.Lock()
        self._started = time.time()
        self._metrics_url = ""

    async def connect(self) -> None:
        """Fail early: no Redis, or a broker that may lose queues, is worth more than a minute of loading."""
        await wait_until_up(self.broker, self.settings.redis)
        await wait_until_up(self.cache, self.settings.redis)
        await refuse_unsafe_broker(self.broker, self.settings.redis.broker_url)
        await self._claim_name()

    async def _claim_name(self) -> None:
        """Two workers of one name would share queues and take turns in the registry. A dead one's entry runs out."""
        until = time.monotonic() + self.settings.worker.lease_s + 1.0
        while (other := next((w for w in await self.registry.workers() if w.id == self.id), None)) is not None:
            if time.monotonic() > until:
                raise MisconfiguredWorker(
                    f"a worker named {self.id} is running already (process {other.pid} on {other.host}): stop it, or "
                    "give this one another name (-n)"
                )
            await asyncio.sleep(0.5)

    async def start(self) -> None:
        """Load the engine, which blocks this loop, then register. Until then the worker takes no task."""
        check(self.settings)
        await self.connect()
        work = await self._load()
        garbage.leave_out_what_is_there()
        self._metrics_url = metrics.serve(self.settings.worker.metrics_host)
        check_blocks(self.record(), await self.registry.workers())
        work += await self._register()
        work += [
            self._heartbeat(),
            cancellation.listen(self.cache, self.jobs.cancel, self.jobs.ids),
            self.supervisor.watch(self.engine),
        ]
        self.supervisor.start(work)
        log.info(
            "worker %s is ready: roles %s, model %s, %d KV tokens, Redis %s",
            self.id,
            ", ".join(sorted(self.settings.roles)),
            self.settings.model,
            self.engine.kv_tokens,
            redacted(self.settings.redis.cache),
        )

    async def _register(self) -> list[Coroutine[Any, Any, None]]:
        """With every adapter of the cluster, where adapters matter; answers what has to run from now on."""
        if not {Role.PREFILL, Role.DECODE} & self.settings.roles:
            await self.announce()
            return []
        registry = AdapterRegistry(self.cache, self.settings.served_name)
        self.adapters = Adapters(self.me, self.engine.loras, registry, self.settings)
        lease_s = self.settings.worker.lease_s
        await self.adapters.join(lambda given_up: registry.join(self.record(), lease_s, given_up))
        return [self.adapters.run(self.cache, self.announce)]

    async def announce(self) -> None:
        """Renew the registration. One at a time: an older record must not overwrite a newer one."""
        async with self._announcing:
            await self.registry.announce(self.record())

    def using(self, task: StageTask) -> AbstractContextManager[None]:
        """The task's adapter stays until the block ends. Raises AdapterMissing if it is not here."""
        return nullcontext() if self.adapters is None else self.adapters.using(task.adapter)

    async def _load(self) -> list[Coroutine[Any, Any, None]]:
        """The engine and what it needs; answers what has to run from now on."""
        from workers.items import service
        from workers.items.memory import EmbeddingMemory
        from workers.loading import Loader

        self.does = model_kind.of(self.settings)
        model_kind.check(self.settings, self.does)
        # Known here before anything lies in their folders, so that these go whatever happens.
        if self.does is Does.GENERATE and kv_events.wanted(self.settings):
            self.kv_events = KVEvents(self.settings, self.id, self.cache)
        if service.wanted(self.settings):
            self._memory = EmbeddingMemory(self.settings, self.id)
        loader = Loader(self.settings, self.me, self.registry, self.cache, self.sender)
        loaded = await loader.load(self.does, self._memory, self.kv_events)
        self.engine, self.prompts, self.fleet, self.items = loaded.engine, loaded.prompts, loaded.fleet, loaded.items
        self.budget = kv_budget.of(self.settings, self.engine)
        return loaded.work

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            incarnation=self.incarnation,
            roles=self.settings.roles,
            model=self.settings.served_name,
            does=self.does,
            multimodal=self.settings.enable_multimodal,
            pid=os.getpid(),
            host=socket.gethostname(),
            concurrency=self.concurrency,
            metrics=self._metrics_url,
            fingerprint=self.items.fingerprint if self.items else "",
            spliceable=self.items.prompts.spliceable if self.items else False,
            placeholders=self.items.placeholders if self.items else {},
            adapters=self.adapters.held if self.adapters else [],
            adapters_failed=self.adapters.failed if self.adapters else {},
            engine=self.engine.state(),
            started=self._started,
            in_flight=len(self.jobs),
            draining=self.draining,
        )

    async def drain(self) -> None:
        """Take no new request; those in flight go on, and the heartbeat with them."""
        self.draining = True
        if self.adapters is not None:
            self.adapters.leave()
        await self.announce()

    def cancel_all(self) -> None:
        """End what is in flight; each client is told that its worker went away."""
        self.jobs.interrupt()

    async def stop(self) -> None:
        """Leave the registry, send what is left, stop the engine, close the connections.

        Whatever fails or does not answer on the way, no shared memory is left.
        """
        self.supervisor.stop()
        try:
            await self.leave()
            if self.kv_events is not None:
                await self.kv_events.close()
        finally:
            try:
                self.engine.shutdown()
            finally:
                await self._close_items()
        await self.cache.aclose()
        await self.broker.aclose()

    async def _close_items(self) -> None:
        try:
            if self.items is not None:
                async with asyncio.timeout(ITEMS_S):
                    await self.items.close()
        except TimeoutError:
            log.warning("the end of worker %s's items took too long: not everybody was told", self.id)
        finally:
            self.remove_memory()

    def remove_memory(self) -> None:
        """Delete the shared memory, if there is any left. For any thread, once nothing writes there any more."""
        for one in (self._memory, self.kv_events):
            if one is not None:
                one.folder.remove()

    async def leave(self) -> None:
        """Out of the registry, and the last tokens out. A Redis that is away must not keep the process from ending."""
        until = time.monotonic() + LAST_WORDS_S
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self.registry.remove(self.id)
        except (RedisError, OSError) as error:
            log.warning("still in the registry until the lease runs out: %s", str(error) or "no answer")
        await self.tokens.drain(max(0.0, min(2.0, until - time.monotonic())))

    async def unplace(self, task: Task, *places: str) -> None:
        """Give the reservations of these names back (all of the request's without any), once its work has moved on.

        One that stays ends with the request, so it is no reason to fail a request that goes on elsewhere.
        """
        try:
            await self.reservations.release(task.api, task.request_id, *places)
        except (RedisError, OSError) as error:
            log.warning("request %s still counts as load: %s", task.request_id, error)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.settings.worker.heartbeat_s)
            try:
                await self.announce()
                await self.tokens.tick()
                await self.reservations.reap()
            except (RedisError, OSError) as error:
                log.warning("heartbeat not delivered: %s", error)


_host: Host | None = None


def install(host: Host) -> None:
    global _host
    _host = host


def current() -> Host:
    """This process's host. Raises RuntimeError when the process is not a started worker."""
    if _host is None:
        raise RuntimeError("no engine in this process: stages run only in `celery -A app.celery worker`")
    return _host
