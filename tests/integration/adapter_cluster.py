"""Workers with the real control loop of adapters over a real Redis, and engines that only note what they hold."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from app import adapters, keys
from app.adapter_registry import AdapterRegistry, Load
from app.adapters import Adapter, AdapterRefused
from app.messages.plans import Assignment
from app.registry import Registry, WorkerRecord
from app.roles import ALL, Role
from app.settings import Settings
from app.settings_media import MediaUrlSettings
from app.settings_sections import WorkerSettings
from tests.messages import worker
from workers.adapters import Adapters
from workers.loras import Limits

MODEL = "m"
SQL = "file:///sql"
LIMITS = Limits(max_rank=8, running=2, held=4)
#: Longer than a busy machine may take for anything; `lose` does not wait for its end.
LEASE_S = 30.0


class Sources:
    """What lies where: uri -> version. `fetch` is what workers are given; `held` counts what was not released. With a
    `gate` fetches wait for it, and `waiting` counts those that came to it."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.held: Counter[str] = Counter()
        self.fetched: list[str] = []
        self.gate: asyncio.Event | None = None
        self.waiting = 0

    async def fetch(
        self, name: str, uri: str, _settings: Any, *, max_rank: int, base_model: str, version: str | None = None
    ) -> Adapter:
        assert base_model == MODEL
        await asyncio.sleep(0)
        if self.gate is not None:
            self.waiting += 1
            await self.gate.wait()
        found = self.versions.get(uri)
        if found is None or (version is not None and version != found):
            raise AdapterRefused(f"nothing at {uri}")
        self.fetched.append(name)
        self.held[f"{name}@{found}"] += 1
        return Adapter(name, found, f"/adapters/{found}", min(8, max_rank), 1000)

    def release(self, adapter: Adapter) -> None:
        self.held[adapter.id] -= 1
        if not self.held[adapter.id]:
            del self.held[adapter.id]


class FakeLoras:
    """An engine's adapters. With a `fault`, that is raised; with a `gate`, an adapter waits for it, and with an `exit`
    one that goes does."""

    def __init__(self, limits: Limits | None = LIMITS) -> None:
        self.limits = limits
        self.loaded: list[str] = []
        self.most = 0
        self.fault: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.exit: asyncio.Event | None = None

    async def add(self, adapter: Adapter) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        assert adapter.id not in self.loaded
        self.loaded.append(adapter.id)
        self.most = max(self.most, len(self.loaded))

    async def remove(self, adapter: str) -> None:
        if self.exit is not None:
            await self.exit.wait()
        self.loaded.remove(adapter)


class RealSources(Sources):
    """What really lies where, fetched and checked as a worker does, under the policy `urls` for archives."""

    def __init__(self, urls: MediaUrlSettings) -> None:
        super().__init__()
        self._urls = urls

    async def fetch(
        self, name: str, uri: str, settings: Any, *, max_rank: int, base_model: str, version: str | None = None
    ) -> Adapter:
        return await adapters.fetch(
            name, uri, settings, max_rank=max_rank, base_model=base_model, version=version, urls=self._urls
        )

    def release(self, adapter: Adapter) -> None:
        adapters.release(adapter)


class Member:
    """A worker of the cluster. Use `running`. `settings` are those of real sources."""

    def __init__(
        self,
        redis: Any,
        sources: Sources,
        one: Assignment,
        *roles: Role,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.engine = FakeLoras(**more)
        self.redis = redis
        self.one = one
        self.roles = roles or tuple(ALL)
        self.registry = Registry(redis, LEASE_S)
        self.cluster = AdapterRegistry(redis, MODEL)
        chosen: dict[str, Any] = {"model": MODEL, "worker": WorkerSettings(heartbeat_s=0.1, lease_s=LEASE_S)} | (
            settings or {}
        )
        self.adapters = Adapters(one, self.engine, self.cluster, Settings(**chosen), sources.fetch, sources.release)
        self.registered = asyncio.Event()
        self.announcing = asyncio.Lock()
        self.tasks: list[asyncio.Task[None]] = []
        self.draining = False

    def record(self) -> WorkerRecord:
        held, failed = self.adapters.held, self.adapters.failed
        return worker(self.one, *self.roles, adapters=held, adapters_failed=failed, draining=self.draining)

    async def announce(self) -> None:
        async with self.announcing:
            await self.registry.announce(self.record())

    async def start(self) -> None:
        async def register(given_up: Collection[str]) -> list[str]:
            return await self.cluster.join(self.record(), LEASE_S, given_up)

        await self.adapters.join(register)
        self.registered.set()
        self.tasks = [
            asyncio.create_task(self.adapters.run(self.redis, self.announce)),
            asyncio.create_task(self.beat()),
        ]

    async def beat(self) -> None:
        while True:
            await self.announce()
            await asyncio.sleep(0.1)

    async def drain(self) -> None:
        self.draining = True
        self.adapters.leave()
        await self.announce()

    async def kill(self) -> None:
        """Stop as a killed process does: nothing is taken back."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not [task for task in self.tasks if not task.cancelled()]
        self.tasks = []

    async def lose(self) -> None:
        """And its lease has run out."""
        await self.kill()
        await self.redis.delete(keys.worker(self.one.worker))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Member"]:
        await self.start()
        try:
            yield self
        finally:
            await self.kill()


@asynccontextmanager
async def cluster(
    redis: Any, sources: Sources, *workers: Assignment, settings: dict[str, Any] | None = None
) -> AsyncIterator[list[Member]]:
    members = [Member(redis, sources, one, settings=settings) for one in workers]
    async with contextlib.AsyncExitStack() as stack:
        for one in members:
            await stack.enter_async_context(one.running())
        yield members


async def load(registry: AdapterRegistry, name: str = "sql", uri: str = SQL, limit_s: float = 20.0) -> Load:
    """How it ended."""
    return await registry.ended(await registry.begin(name, uri, limit_s), limit_s)


async def resolve(registry: AdapterRegistry, name: str = "sql", request: str = "r") -> str:
    """The adapter that the request uses from now on."""
    return await registry.resolve(name, request, time.time() + 60)
