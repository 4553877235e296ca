"""What keeps Redis told of the KV blocks of this worker's engine, from its start to its end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from redis.exceptions import RedisError

from app import keys
from app.roles import Role
from app.routing import affinity
from app.routing.affinity import HeldBlocks
from app.settings import Settings
from app.tensors.folder import make_folder
from workers.kv_events import ledger, subscription
from workers.kv_events.ledger import Ledger
from workers.kv_events.subscription import Source, Subscription
from workers.metrics import KVEventMetrics

log = logging.getLogger(__name__)

#: How long the engine reports what requests find in its cache, once that is wanted.
REPORTS_S = 60.0
#: Pause after a fault, so that one that repeats itself does not fill the log.
PAUSE_S = 1.0
#: Longest deletion of what a worker that ends held.
LAST_WORDS_S = 1.0

#: What is counted of each rank, besides `rebuilds`.
COUNTED = (ledger.Counts, subscription.Counts, affinity.Counts)


def wanted(settings: Settings) -> bool:
    """Whether a worker with these settings publishes its blocks. One that only encodes has none."""
    return settings.routing.kv_events and bool({Role.PREFILL, Role.DECODE} & settings.roles)


class Rank:
    """One engine: a data-parallel rank of the worker, with a set of names of its own."""

    def __init__(self, source: Source, block_size: int, held: HeldBlocks) -> None:
        self.held = held
        self.subscription = Subscription(source)
        self.ledger = Ledger(block_size, held)
        self.rebuilds = 0
        self.reports_until = 0.0
        self._source = source

    async def follow(self) -> None:
        """Never ends: what goes wrong here costs requests a detour, and must not cost the worker its life."""
        while True:
            try:
                await self._follow()
            except Exception:
                log.exception("the KV events of %s could not be taken", self._source.endpoint)
                self._begin_anew()
                await asyncio.sleep(PAUSE_S)

    async def _follow(self) -> None:
        async with aclosing(self.subscription.batches()) as batches:
            async for batch in batches:
                if batch is None:
                    self._begin_anew()
                    continue
                orphans = self.ledger.counts.orphans
                self.ledger.take(batch)
                if self.ledger.counts.orphans > orphans or self.held.full:
                    self._ask_for_reports()
                await asyncio.sleep(0)  # there may be many, and receiving what is there already never waits

    def _begin_anew(self) -> None:
        self.rebuilds += 1
        log.warning("what %s holds is learnt anew: %d KV blocks forgotten", self._source.endpoint, len(self.held))
        self.ledger.forget()
        self._ask_for_reports()

    def _ask_for_reports(self) -> None:
        """Of what requests find: it is not known, or it should be known who of too many is in use."""
        self.ledger.expect_reports()
        self.reports_until = time.monotonic() + REPORTS_S


class KVEvents:
    """Made before the engine, which publishes in the folder `sockets`; begins with `start`."""

    def __init__(self, settings: Settings, worker_id: str, redis: Any, metrics: CollectorRegistry = REGISTRY) -> None:
        self.folder = make_folder(Path(settings.tensors.directory), "kv")
        self.ranks: dict[int, Rank] = {}
        self._settings = settings
        self._worker_id = worker_id
        self._redis = redis
        self._registry, self._metrics = metrics, KVEventMetrics(self)

    @property
    def sockets(self) -> Path:
        return self.folder.path

    def start(self, sources: Mapping[int, Source], block_size: int) -> list[Coroutine[Any, Any, None]]:
        """What has to run from now on. `sources` are where the engine publishes, by rank, and `block_size` is that of
        its events, in tokens."""
        if not sources:
            log.warning("worker %s's engine publishes no KV events: routers do not know what it holds", self._worker_id)
        self.ranks = {rank: Rank(source, block_size, self._held(rank)) for rank, source in sources.items()}
        self._registry.register(self._metrics)
        return [one for rank in self.ranks.values() for one in (rank.follow(), rank.held.run())]

    def _held(self, rank: int) -> HeldBlocks:
        return HeldBlocks(
            self._redis,
            keys.kv(self._worker_id, rank),
            lease_s=self._settings.worker.lease_s,
            renew_s=self._settings.worker.heartbeat_s,
            most=self._settings.routing.max_blocks_per_worker,
        )

    def reporting(self) -> bool:
        """Whether the engine should report the blocks that requests find in its cache, as if it stored them."""
        return any(rank.reports_until > time.monotonic() for rank in self.ranks.values())

    def counts(self) -> dict[str, int]:
        """Events so far, of all ranks."""
        total = {field.name: 0 for part in COUNTED for field in dataclasses.fields(part)} | {"rebuilds": 0}
        for rank in self.ranks.values():
            for part in (rank.ledger.counts, rank.subscription.counts, rank.held.counts):
                for name, value in dataclasses.asdict(part).items():
                    total[name] += value
            total["rebuilds"] += rank.rebuilds
        return total

    async def close(self) -> None:
        """After `start`, once its work has been cancelled. A Redis that does not answer keeps the names until the lease
        ends."""
        self._registry.unregister(self._metrics)
        for rank in self.ranks.values():
            rank.subscription.close()
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await rank.held.close()
            except (RedisError, OSError) as error:
                log.warning("KV blocks stay in Redis until the lease runs out: %s", str(error) or "no answer")
