"""What a worker process holds: one engine, its connections, its registration, and the requests in flight."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from app import cancellation, keys
from app.messages import Assignment
from app.redis import connect, redacted, refuse_unsafe_broker, wait_until_up
from app.registry import Registry, WorkerRecord
from app.roles import Role
from app.sender import TaskSender
from app.settings import Settings
from app.streaming import TokenWriter
from workers import metrics
from workers.engine import Engine
from workers.items.ready import Prompts, TextPrompts
from workers.jobs import Jobs
from workers.kv_budget import KVBudget

if TYPE_CHECKING:
    from workers.items.service import ItemService

log = logging.getLogger(__name__)


#: KV tokens where requests may be preempted.
UNBOUNDED = 1 << 62


class MisconfiguredWorker(RuntimeError):
    """The worker's settings contradict each other; it must not start."""


class Host:
    """Everything that the stages of this process share. Made by `start`, on the loop that runs them."""

    engine: Engine
    budget: KVBudget
    prompts: Prompts
    items: ItemService | None = None

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
        self.jobs = Jobs()
        self.tokens = TokenWriter(
            self.cache, worker_id, self.incarnation, settings.stream.replay_batches, self.jobs.cancel_of
        )
        self.failed = asyncio.Event()
        self.draining = False
        self._started = time.time()
        self._background: list[asyncio.Task[None]] = []
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
        self._metrics_url = metrics.serve(self.settings.worker.metrics_host)
        await self.registry.announce(self.record())
        work += [
            self._heartbeat(),
            cancellation.listen(self.cache, self.jobs.cancel, self.jobs.ids),
            self._watch_engine(),
        ]
        self._background = [self._spawn(one) for one in work]
        log.info(
            "worker %s is ready: roles %s, model %s, %d KV tokens, Redis %s",
            self.id,
            ", ".join(sorted(self.settings.roles)),
            self.settings.model,
            self.engine.kv_tokens,
            redacted(self.settings.redis.cache),
        )

    async def _load(self) -> list[Coroutine[Any, Any, None]]:
        """The engine and what its items need; answers what has to run from now on."""
        from workers.items import service

        shelf = service.Shelf(self.settings, self.id) if service.wanted(self.settings) else None
        try:
            self.engine = Engine(self.settings, shelf.embeddings if shelf else None)
        except BaseException:
            if shelf is not None:
                shelf.close()
            raise
        self.budget = KVBudget(self._kv_tokens_to_share(), self.engine.block_size)
        if shelf is None:
            self.prompts = TextPrompts(self.engine.renderer)
            return []
        self.items = service.ItemService(self.settings, self.me, self.engine, shelf, self.cache, self.sender)
        work = await self.items.start()
        self.prompts = self.items.prompts
        return work

    def _kv_tokens_to_share(self) -> int:
        """KV tokens that requests wait for. Where the prompt is prefilled, its embeddings are held, and a request that
        the engine preempts can be prefilled again; elsewhere only one of text alone can."""
        if not self.settings.enable_multimodal or Role.DECODE not in self.settings.roles:
            return UNBOUNDED
        if Role.PREFILL in self.settings.roles:
            return UNBOUNDED
        fits = self.engine.kv_tokens // self.engine.max_model_len
        log.info(
            "%d KV tokens hold %d requests of full length (%d tokens): what does not fit waits and is never preempted",
            self.engine.kv_tokens,
            fits,
            self.engine.max_model_len,
        )
        return self.engine.kv_tokens

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            incarnation=self.incarnation,
            roles=self.settings.roles,
            model=self.settings.served_name,
            multimodal=self.settings.enable_multimodal,
            pid=os.getpid(),
            host=socket.gethostname(),
            concurrency=self.concurrency,
            metrics=self._metrics_url,
            fingerprint=self.items.fingerprint if self.items else "",
            spliceable=self.items.prompts.spliceable if self.items else False,
            engine=self.engine.state(),
            started=self._started,
            in_flight=len(self.jobs),
            draining=self.draining,
        )

    async def drain(self) -> None:
        """Take no new request; those in flight go on, and the heartbeat with them."""
        self.draining = True
        await self.registry.announce(self.record())

    def cancel_all(self) -> None:
        """End what is in flight; each client is told that its worker went away."""
        self.jobs.interrupt()

    async def stop(self) -> None:
        """Leave the registry, send what is left, stop the engine, close the connections."""
        for task in self._background:
            task.cancel()
        await self.leave()
        self.engine.shutdown()
        if self.items is not None:
            await self.items.close()
        await self.cache.aclose()
        await self.broker.aclose()

    async def leave(self) -> None:
        """Out of the registry, and the last tokens out. A Redis that is away must not keep the process from ending."""
        try:
            await self.registry.remove(self.id)
        except (RedisError, OSError) as error:
            log.warning("still in the registry until the lease runs out: %s", error)
        await self.tokens.drain(2.0)

    async def unplace(self, place: str) -> None:
        """Give this worker's reservation (a request's id, or that of an encode) back, once its work has moved on.

        One that stays ends with the request, so it is no reason to fail a request that goes on elsewhere.
        """
        try:
            await self.cache.zrem(keys.load(self.id), place)
        except (RedisError, OSError) as error:
            log.warning("request %s still counts as load of worker %s: %s", place, self.id, error)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.settings.worker.heartbeat_s)
            try:
                await self.registry.announce(self.record())
                await self.tokens.tick()
            except (RedisError, OSError) as error:
                log.warning("heartbeat not delivered: %s", error)

    async def _watch_engine(self) -> None:
        while not self.engine.dead:  # noqa: ASYNC110  (vLLM sets a flag and tells nobody)
            await asyncio.sleep(0.2)
        log.critical("the engine of worker %s died; the worker ends so that it can be started anew", self.id)
        self.failed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._must_not_end)
        return task

    def _must_not_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.failed.is_set():
            return
        log.critical("a background task of worker %s ended: %r", self.id, task.exception())
        self.failed.set()


def check(settings: Settings) -> None:
    """Raise MisconfiguredWorker for roles that the other settings forbid."""
    roles = settings.roles
    if Role.ENCODE in roles and not settings.enable_multimodal:
        raise MisconfiguredWorker(
            "a worker with the encode role takes media from clients, which needs consent: start it with "
            "--enable-multimodal (TRIVET_ENABLE_MULTIMODAL=true), or without encode among its roles"
        )
    split = len({Role.ENCODE, Role.PREFILL} & roles) == 1
    if settings.enable_multimodal and split and not settings.multimodal_embedding_cache_capacity_gb:
        raise MisconfiguredWorker(
            "embeddings go from encode to prefill workers through their embedding caches: give both some memory "
            "(TRIVET_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB), or one worker both roles"
        )


_host: Host | None = None


def install(host: Host) -> None:
    global _host
    _host = host


def current() -> Host:
    """This process's host. Raises RuntimeError when the process is not a started worker."""
    if _host is None:
        raise RuntimeError("no engine in this process: stages run only in `celery -A app.celery worker`")
    return _host
