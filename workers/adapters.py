"""Brings the adapters of this worker to what the cluster wants: that is held, and what nobody wants is let go.

Nothing here waits for a message: each look at Redis says all that there is to do, and a message only makes it come
sooner. See app.adapter_registry for how the workers of a model come to hold the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import AbstractContextManager, aclosing
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from app import adapters, keys
from app.adapter_registry import AdapterRegistry, Load, Published, Report, Wanted, changed
from app.adapters import Adapter
from app.adapters.fetch import THREADS
from app.errors.adapters import AdapterRefused
from app.errors.base import TrivetError
from app.errors.serving import BrokerUnavailable, WorkerLost
from app.messages.plans import Assignment
from app.redis import subscription
from app.settings import Settings
from workers import metrics
from workers.held_adapters import HeldAdapters
from workers.loras import Limits, Loras

log = logging.getLogger(__name__)

#: Pause before a published adapter that could not be loaded is tried again.
AGAIN_S = 30.0
#: Longest engine's share in loading an adapter, after it was fetched.
ENGINE_S = 60.0


class Failed(NamedTuple):
    """Why a published adapter is not here, and when it is tried again (monotonic seconds)."""

    reason: str
    again: float


class Adapters:
    """Used on the loop that runs the stages only."""

    def __init__(
        self,
        me: Assignment,
        engine: Loras,
        registry: AdapterRegistry,
        settings: Settings,
        fetch: Callable[..., Awaitable[Adapter]] = adapters.fetch,
        release: Callable[[Adapter], None] = adapters.release,
    ) -> None:
        self._me = me
        self._engine = engine
        self._registry = registry
        self._settings = settings.adapters
        self._base, self._model = settings.model, settings.served_name
        self._heartbeat_s = settings.worker.heartbeat_s
        self._announce: Callable[[], Awaitable[None]] | None = None
        self._fetch = fetch
        self._held = HeldAdapters(engine, registry.look, release, self._tell)
        self._failed: dict[str, Failed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Each has the whole time limit for itself.
        self._fetching = asyncio.Semaphore(THREADS)
        self._wake = asyncio.Event()
        self._leaving = False

    @property
    def held(self) -> list[str]:
        """Ids."""
        return self._held.ids

    @property
    def failed(self) -> dict[str, str]:
        """Id of a published adapter that is not here -> why."""
        return {adapter: one.reason for adapter, one in self._failed.items()}

    def using(self, adapter: str) -> AbstractContextManager[None]:
        """Until the block ends the adapter stays. Raises AdapterMissing if it is not here; "" is the model itself."""
        return self._held.using(adapter)

    async def join(self, register: Callable[[Collection[str]], Awaitable[list[str]]]) -> None:
        """Hold all that is published, then register, with the ids of those that cannot be had; `register` answers what
        is missing, since it was published meanwhile. Raises BrokerUnavailable."""
        while True:
            wanted = await self._registry.look(self.held)
            missing = [
                one for one in wanted.published.values() if one.id not in self._held and one.id not in self._failed
            ]
            # At once, so that slow sources cost as much time as one of them.
            async with asyncio.TaskGroup() as group:
                for one in missing:
                    group.create_task(self._catch_up(one))
            if not await register(self._failed):
                return

    def leave(self) -> None:
        """Take nothing in any more, and no part in loads: this worker drains, and the others go on without it."""
        self._leaving = True

    async def run(self, redis: Any, announce: Callable[[], Awaitable[None]]) -> None:
        """For ever, after `join`. `announce` writes this worker's record, with `held` and `failed` in it."""
        self._announce = announce
        listening = asyncio.create_task(self._listen(redis))
        try:
            while True:
                self._wake.clear()
                try:
                    await self._reconcile()
                except BrokerUnavailable as error:
                    log.warning("adapters stay as they are: %s", error.message)
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            ending = [listening, *self._tasks.values()]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _listen(self, redis: Any) -> None:
        while True:
            try:
                async with aclosing(subscription(redis, keys.LORAS_CHANNEL)) as messages:
                    async for message in messages:
                        if message is None or changed(message, self._model):
                            self._wake.set()
            except (RedisError, OSError) as error:
                log.warning("the channel of adapters is lost, subscribing again: %s", error)
                await asyncio.sleep(0.5)

    async def _reconcile(self) -> None:
        looked, keeping = self.held, self._held.loads
        wanted = await self._registry.look(looked)
        under_way = {load.load: load for load in wanted.loads.values() if load.state == "loading"}
        self._held.end_loads(keeping - under_way.keys())
        for name in self._tasks.keys() - under_way.keys() - {one.id for one in wanted.published.values()}:
            self._tasks[name].cancel()
        if not self._leaving:
            for load in under_way.values():
                if not self._has_spoken(load):
                    self._start(load.load, self._take_part(load, wanted.left[load.name]))
            self._catch_up_with(wanted)
        await self._held.drop(wanted, looked)

    def _has_spoken(self, load: Load) -> bool:
        report = load.workers.get(self._me.worker)
        return report is not None and report.incarnation == self._me.incarnation

    def _catch_up_with(self, wanted: Wanted) -> None:
        ids = {one.id for one in wanted.published.values()}
        self._failed = {adapter: one for adapter, one in self._failed.items() if adapter in ids}
        for one in wanted.published.values():
            failed = self._failed.get(one.id)
            if one.id not in self._held and (failed is None or failed.again < time.monotonic()):
                self._start(one.id, self._catch_up(one))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """One task at a time of each name."""
        if name in self._tasks:
            return work.close()
        task = self._tasks[name] = asyncio.create_task(work)

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[name]
            if task.cancelled() or (error := task.exception()) is None:
                self._wake.set()
            else:
                log.error("adapter work failed, and is tried again: %s", error)

        task.add_done_callback(ended)

    async def _take_part(self, load: Load, left_s: float) -> None:
        """This worker's part of a load, up to its report; none if it leaves meanwhile. Raises WorkerLost: a worker that
        dies says nothing of the adapter, and is waited for no longer once it is gone."""
        try:
            async with asyncio.timeout(left_s):
                adapter = await self._have(load.name, load.uri, load=load.load)
            report = self._report(state="loaded", version=adapter.version, rank=adapter.rank, size=adapter.size)
        except WorkerLost:
            raise
        except Exception as error:
            reason, refused = self._why(load.name, error)
            report = self._report(state="failed", reason=reason, refused=refused)
        await self._tell()  # before the name is published, which may be with this report
        if not self._leaving:
            await self._registry.report(load, self._me.worker, report)

    def _report(self, **said: Any) -> Report:
        return Report(incarnation=self._me.incarnation, **said)

    async def _catch_up(self, one: Published) -> None:
        """Hold what was published without this worker."""
        try:
            async with self._fetching, asyncio.timeout(self._settings.fetch_timeout_s + ENGINE_S):
                await self._have(one.name, one.uri, version=one.version)
            self._failed.pop(one.id, None)
        except Exception as error:
            reason, _ = self._why(one.name, error)
            self._failed[one.id] = Failed(reason, time.monotonic() + AGAIN_S)
        await self._tell()

    @staticmethod
    def _why(name: str, error: Exception) -> tuple[str, bool]:
        """Why an adapter is not here, and whether it is itself at fault."""
        refused = False
        if isinstance(error, TrivetError):
            reason, refused = error.message[:500], error.status < 500
        elif isinstance(error, TimeoutError):
            reason = "not in time"
        else:
            log.error("adapter %s could not be loaded", name, exc_info=error)
            reason = f"the worker failed ({type(error).__name__}; see its log)"
        log.warning("adapter %s is not here: %s", name, reason)
        metrics.ADAPTERS.labels("failed").inc()
        return reason, refused

    async def _tell(self) -> None:
        if self._announce is None:
            return  # not registered yet
        try:
            await self._announce()
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the worker's record was not written ({type(error).__name__})") from error

    async def _have(self, name: str, uri: str, *, version: str | None = None, load: str = "") -> Adapter:
        """The adapter, which the engine holds then. Raises TrivetError."""
        limits = self._engine.limits
        if limits is None:
            raise AdapterRefused("this worker's engine takes no adapters: start it with --enable-lora")
        adapter = await self._fetch(
            name, uri, self._settings, max_rank=limits.max_rank, base_model=self._base, version=version
        )
        # Goes on when nobody waits for it any more: else the engine could have it, and nobody would know.
        adding = asyncio.create_task(self._add(adapter, limits, load))
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(self._abandoned)
            raise
        return adapter

    def _abandoned(self, adding: asyncio.Task[None]) -> None:
        self._wake.set()
        if not adding.cancelled() and (error := adding.exception()) is not None:
            log.info("an adapter that is not wanted any more could not be loaded either: %s", error)

    async def _add(self, adapter: Adapter, limits: Limits, load: str) -> None:
        if await self._held.add(adapter, limits, load):
            self._failed.pop(adapter.id, None)  # it was too late for whoever waited
