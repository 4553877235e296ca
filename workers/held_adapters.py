"""The adapters that this worker's engine holds: given to it, kept for who needs them, and taken from it again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from app.adapter_registry import Wanted
from app.adapters import Adapter
from app.errors.adapters import AdapterLoadFailed, AdapterMissing
from workers import metrics
from workers.loras import Limits, Loras

log = logging.getLogger(__name__)


class HeldAdapters:
    """Used on the loop that runs the stages only. `look` says what the cluster wants, given the ids of what is held
    here, `release` lets an adapter's files go, and `tell` writes anew which are held once some are no longer."""

    def __init__(
        self,
        engine: Loras,
        look: Callable[[Collection[str]], Awaitable[Wanted]],
        release: Callable[[Adapter], None],
        tell: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._look = look
        self._release = release
        self._tell = tell
        self._held: dict[str, Adapter] = {}
        self._using: Counter[str] = Counter()
        #: Of loads that have not ended: load -> adapter, which has to stay until it is known how they ended.
        self._kept: dict[str, str] = {}
        self._changing = asyncio.Lock()

    @property
    def ids(self) -> list[str]:
        return sorted(self._held)

    @property
    def loads(self) -> set[str]:
        """Those that keep an adapter here."""
        return set(self._kept)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._held

    @contextmanager
    def using(self, adapter: str) -> Iterator[None]:
        """Until the block ends the adapter stays. Raises AdapterMissing if it is not here; "" is the model itself."""
        if adapter and adapter not in self._held:
            metrics.ADAPTERS.labels("missing").inc()
            raise AdapterMissing("the worker does not hold the adapter of the request")
        self._using[adapter] += 1
        try:
            yield
        finally:
            self._using[adapter] -= 1
            if not self._using[adapter]:
                del self._using[adapter]

    async def add(self, adapter: Adapter, limits: Limits, load: str = "") -> bool:
        """Give it to the engine, and keep it until the load has ended. False, and its files are released, if it was
        here already. Raises AdapterLoadFailed, AdapterRefused, BrokerUnavailable and WorkerLost."""
        taken = False
        try:
            async with self._changing:
                if adapter.id not in self._held:
                    await self._make_room(limits)
                    await self._engine.add(adapter)
                    self._held[adapter.id] = adapter
                    taken = True
                    self._count("loaded")
                    log.info("adapter %s: rank %d, %d bytes", adapter.id, adapter.rank, adapter.size)
                if load:
                    self._kept[load] = adapter.id
        finally:
            if not taken:
                self._release(adapter)
        return taken

    def end_loads(self, loads: Iterable[str]) -> None:
        """These keep nothing any more."""
        for load in loads:
            self._kept.pop(load, None)

    async def drop(self, wanted: Wanted, looked: Collection[str]) -> None:
        """Let go what nobody wants, and nobody uses, of what was held at the time of the look."""
        async with self._changing:
            await self._drop(wanted, looked)

    async def _make_room(self, limits: Limits) -> None:
        """Raises AdapterLoadFailed when as many adapters as the engine holds are wanted, or in use."""
        if len(self._held) < limits.held:
            return
        looked = self.ids
        await self._drop(await self._look(looked), looked)
        if len(self._held) >= limits.held:
            raise AdapterLoadFailed(
                f"this worker's engine holds {len(self._held)} adapters, as many as --max-cpu-loras (by default "
                "--max-loras) allows: unload one, or start the workers with more"
            )

    async def _drop(self, wanted: Wanted, looked: Collection[str]) -> None:
        keep = {one.id for one in wanted.published.values()} | set(self._kept.values())
        let_go = False
        for one in looked:
            if one not in self._held or one in keep or wanted.users.get(one) or one in self._using:
                continue  # looked at anew for each: requests come while the engine lets the one before go
            adapter, let_go = self._held.pop(one), True
            try:
                await self._engine.remove(one)
            finally:
                self._release(adapter)
            log.info("adapter %s was let go", one)
            self._count("let_go")
        if let_go:
            await self._tell()

    def _count(self, event: str) -> None:
        metrics.ADAPTERS.labels(event).inc()
        metrics.ADAPTERS_HELD.set(len(self._held))
