"""Workers of a cluster in one process: all that handles items is real, but for vLLM's engine and renderer.

Each has its own store in shared memory, NIXL agent, connections and view of the fleet, and takes encode tasks from its
own queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from app import keys, sender
from app.messages.prompts import Prompt
from app.redis import connect
from app.roles import Role
from app.settings import Settings
from app.settings_sections import ItemSettings, TensorSettings, WorkerSettings
from app.tensors import segment
from tests.integration.item_api import Api
from tests.integration.item_engine import ITEM, FakeEngine
from tests.items import identity
from tests.messages import decode_task
from tests.polling import until
from workers import host as hosting
from workers import tasks
from workers.draining import turn_away
from workers.items.encoder import AT_ONCE
from workers.kv_budget import UNBOUNDED, KVBudget

E, PD, ENCODES = (Role.ENCODE,), (Role.PREFILL, Role.DECODE), tuple(Role)

#: The worker that took the task: in place of `workers.tasks.current`, since a process has one and this one several.
taker: ContextVar[hosting.Host] = ContextVar("taker")


class Worker:
    """Made by `Cluster.worker`."""

    def __init__(self, settings: Settings, name: str) -> None:
        from workers.items.memory import EmbeddingMemory
        from workers.items.service import ItemService

        memory = EmbeddingMemory(settings, name)
        self.settings = settings
        self.host = hosting.Host(settings, name, 8)
        self.me = self.host.me
        self.engine = FakeEngine(memory.embeddings)
        self.folder = memory.folder.path
        self.registry = CollectorRegistry()
        engine: Any = self.engine
        self.host.engine, self.host.budget = engine, KVBudget(UNBOUNDED, 16)
        self.items = ItemService(settings, self.me, engine, memory, self.host.cache, self.host.sender, self.registry)
        self.host.items = self.items
        self.local, self.store, self.counts = self.items.local, self.items.local.store, self.items.finder.counts
        self.tasks: set[asyncio.Task[Any]] = set()
        self.failed: list[BaseException] = []
        self._background: list[asyncio.Task[Any]] = []
        self.closed = self.dead = False

    async def start(self) -> None:
        work = await self.items.start()
        self.host.prompts = self.items.prompts
        await self.host.registry.announce(self.host.record())
        work.append(self._beat())
        self._background = [asyncio.create_task(one) for one in work]
        if Role.ENCODE in self.settings.roles:
            self.take()
        await asyncio.wait_for(self.items._announcements.subscribed.wait(), 10)

    async def answer(self, prompt: Prompt, request_id: str = "r") -> None:
        """What a prefill stage does."""
        task = decode_task(request_id, prompt=prompt)
        async with self.host.prompts.ready(task, prompt) as ready:
            await self.engine.run(ready.engine_input)
            await ready.encoded()

    async def run_task(self, content: Any) -> None:
        """An encode task as it comes from the queue."""
        taker.set(self.host)
        _, message = sender.opened(content)
        await tasks.encode.run(message)

    async def die(self) -> None:
        """As if killed, and as if its lease were over: it takes nothing, says nothing, and its files stay."""
        self.dead = True
        for one in self._background:
            one.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.host.registry.remove(self.host.id)

    def take(self) -> None:
        """Take encode tasks from the queue."""
        self._background.append(asyncio.create_task(self._take()))

    async def stop_taking(self) -> None:
        """Leave encode tasks in the queue."""
        self._background[-1].cancel()
        await asyncio.gather(self._background[-1], return_exceptions=True)

    async def drain(self) -> None:
        await self.host.drain()
        await turn_away(self.host)

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for one in [*self._background, *self.tasks]:
            one.cancel()
        await asyncio.gather(*self._background, *self.tasks, return_exceptions=True)
        await self.items.close()
        assert not self.folder.exists(), "shared memory was left"
        await self.disconnect()

    async def disconnect(self) -> None:
        for client in (self.host.cache, self.host.broker):
            await client.aclose()

    def leftovers(self) -> dict[str, Any]:
        """What must not be there when nothing is going on."""
        store, local, items = self.store, self.local, self.items
        names = {segment.file_name(one) for one in store._entries}
        files = {path.name for path in store.directory.iterdir() if path.is_file()}
        found = {
            "holds": dict(store._holds),
            "reservations": dict(store._reserved),
            "files": files ^ names,
            "encoding": local._encoding,
            "records": local.published._records.keys() ^ store._entries.keys(),
            "renewed": local.published._renewed.keys() ^ local.published._records.keys(),
            "locks": [one for one in [*local._locks.values(), *items.encoder._locks.values()] if one.locked()],
            "arrivals": items.encoder.arrivals._settled,
            "decoded": items.encoder.decoded.used,
            "slots": AT_ONCE - items.encoder.slots._value,
            "room": (local.room._wanted, local.room._queue, local.room._grants) if _used(local.room) else (),
            "work": items._running,
            "watches": items._announcements._watches,
            "jobs": self.host.jobs.ids(),
            "tasks": self.tasks,
        }
        return {what: left for what, left in found.items() if left}

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.3)
            with contextlib.suppress(RedisError, OSError):
                await self.host.registry.announce(self.host.record())

    async def _take(self) -> None:
        queue = keys.worker_queue(Role.ENCODE, self.host.id)
        while True:
            try:
                taken = await self.host.broker.brpop([queue], timeout=1)
            except (RedisError, OSError):
                await asyncio.sleep(0.05)
                continue
            if taken is not None:
                task = asyncio.create_task(self.run_task(taken[1]))
                self.tasks.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed.append(error)


def _used(room: Any) -> bool:
    return bool(room._wanted or room._queue or room._grants)


class Cluster:
    """Use `cluster`."""

    def __init__(self, root: Path, model: Path, redis_url: str, redis: Any) -> None:
        self.root = root
        self.redis = redis
        self.workers: list[Worker] = []
        self.encode_timeout_s = 30.0
        self.max_record_kb = 1024
        self._model = model
        self._url = redis_url
        self._numbers = itertools.count()
        self._api: Api | None = None

    @property
    def api(self) -> Api:
        assert self._api is not None
        return self._api

    @property
    def index(self) -> Any:
        return self.workers[0].items.index

    async def worker(self, name: str, roles: tuple[Role, ...], **changes: Any) -> Worker:
        """`room` is the store's, in items; `splices` whether the model's prompts can be put together from records.

        What else is given are tensor settings.
        """
        room, splices = changes.pop("room", 100), changes.pop("splices", True)
        settings = Settings(
            model=str(self._model),
            served_model_name="m",
            enable_multimodal=True,
            multimodal_embedding_cache_capacity_gb=(int(room * ITEM) + 0.5) / 1e9,
            redis={"broker_url": self._url, "timeout_s": 5.0},
            worker=WorkerSettings(roles=frozenset(roles), heartbeat_s=0.3, lease_s=20.0),
            tensors=TensorSettings(directory=str(self.root), **changes),
            items=ItemSettings(encode_timeout_s=self.encode_timeout_s, max_record_kb=self.max_record_kb),
        )
        made = Worker(settings, name)
        made.engine.renderer.splices = splices
        try:
            await made.start()
        except BaseException:
            await made.disconnect()
            raise
        self.workers.append(made)
        for one in self.workers:
            await one.items.fleet.refresh()
        return made

    async def start_api(self) -> None:
        self._api = Api(self.root, self.redis, self.encode_timeout_s)
        await self._api.plane.start()

    async def ask(self, worker: Worker, *numbers: int, placed: bool = True, prompt: Prompt | None = None) -> None:
        """A request for these items, answered by that worker; `placed` as the API does it, before it is sent."""
        prompt = prompt or await self.api.prompt(*numbers)
        request_id = f"r{next(self._numbers)}"
        if placed:
            fleet = worker.items.fleet.now
            await self.api.place(fleet, worker.items.fingerprint, prompt, request_id)
        await worker.answer(prompt, request_id)

    def encodes(self) -> Counter[str]:
        return sum((one.engine.encodes for one in self.workers), Counter())

    async def holders(self, number: int) -> set[str]:
        """Who is said to hold the item."""
        found = await self.index.find([identity(number)])
        return set(found[identity(number)].holders)

    async def claims(self) -> list[bytes]:
        return [name async for name in self.redis.scan_iter(f"{keys.PREFIX}encoding:*")]

    async def quiet(self) -> None:
        """Wait until nothing is going on; fail if something is left."""

        async def over() -> bool:
            return (
                not any(one.leftovers() for one in self.workers if not one.dead and not one.closed)
                and not await self.claims()
            )

        try:
            await until(over, "the end of all work")
        except BaseException as error:
            left = {one.me.worker: one.leftovers() for one in self.workers}
            raise AssertionError(f"left: {left}, claims: {await self.claims()}") from error

    async def close(self) -> None:
        for one in self.workers:
            await one.close()
        if self._api is not None:
            await self._api.close()


@asynccontextmanager
async def cluster(root: Path, model: Path, redis_url: str) -> AsyncIterator[Cluster]:
    """An empty Redis and no workers. However it goes, nothing may be left in shared memory."""
    (model / "config.json").write_text("{}")
    client = connect(redis_url, 5.0, name="test")
    await client.flushall()
    made = Cluster(root, model, redis_url, client)
    await made.start_api()
    try:
        yield made
    finally:
        await made.close()
        await client.aclose()
