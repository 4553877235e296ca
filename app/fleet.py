"""A process's view of the workers, and whom it tells when one of them goes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from app.errors.adapters import AdapterMissing
from app.errors.serving import BrokerUnavailable
from app.messages.plans import Assignment
from app.registry import Fleet, Registry

log = logging.getLogger(__name__)

#: Seconds between two looks at the registry.
REFRESH_S = 0.5
#: How long a worker may be missing, in its heartbeats: a Redis that was restarted empty knows it again after the next.
GRACE_HEARTBEATS = 2.5
#: Workers that are remembered as gone. An incarnation does not come back, or the view has it.
UNKNOWN = 1000


class FleetView:
    """Reads the registry for ever; `now` is the last view. Redis being away leaves the view as it is."""

    def __init__(
        self, registry: Registry, model: str, on_lost: Callable[[Assignment], None], heartbeat_s: float = 1.0
    ) -> None:
        self._registry = registry
        self._model = model
        self._on_lost = on_lost
        self._grace_s = GRACE_HEARTBEATS * heartbeat_s
        self._missing_since: dict[Assignment, float] = {}
        self._begun = self._seen = 0
        self._looking = asyncio.Lock()
        self._unknown: set[Assignment] = set()
        self.now = Fleet()
        self.reachable = False

    async def refresh(self) -> Fleet:
        self._begun += 1
        number = self._begun
        fleet = Fleet.of(await self._registry.workers(), self._model)
        self.reachable = True
        if number < self._seen:  # a later one was quicker
            return self.now
        self._seen = number
        before, self.now = self.now, fleet
        self._notice(before)
        return self.now

    async def knows(self, worker: Assignment) -> bool:
        """Whether it is in the registry. One that this view does not have may be new: the registry is asked, once.

        When Redis does not answer, True: nobody knows that it is gone.
        """
        if self.now.find(worker.worker, worker.incarnation) is not None:
            return True
        if worker not in self._unknown:
            try:
                await self._look()
            except (RedisError, OSError):
                return True
            if self.now.find(worker.worker, worker.incarnation) is not None:
                return True
            if len(self._unknown) >= UNKNOWN:
                self._unknown.clear()
            self._unknown.add(worker)
        return False

    async def holding(self, adapter: str, suffices: Callable[[Fleet], bool]) -> Fleet:
        """The workers that hold an adapter (an id; "" is the model itself). One that was published, or a worker that
        came up, a moment ago may be new to this view, so it is renewed unless they suffice. Raises BrokerUnavailable,
        and AdapterMissing where all workers would suffice and these do not."""
        if suffices(self.now.holding(adapter)):
            return self.now.holding(adapter)
        await self.renew()
        found = self.now.holding(adapter)
        if suffices(self.now) and not suffices(found):
            raise AdapterMissing("no worker that is needed for the request holds its adapter any more")
        return found

    async def renew(self) -> None:
        """Look now. Raises BrokerUnavailable."""
        try:
            await self._look()
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the registry did not answer ({type(error).__name__})") from error

    async def _look(self) -> None:
        """A refresh that begins from now on. All who ask for one during another one share the next."""
        asked = self._begun
        async with self._looking:
            if self._seen <= asked:
                await self.refresh()

    def is_lost(self, worker: Assignment) -> bool:
        """Whether `on_lost` has been told of it: whoever begins to depend on it now would not hear of that."""
        return self.now.find(worker.worker, worker.incarnation) is None and worker not in self._missing_since

    async def run(self) -> None:
        while True:
            try:
                await self.refresh()
            except (RedisError, OSError) as error:
                if self.reachable:
                    log.warning("the registry is not reachable: %s", error)
                self.reachable = False
            await asyncio.sleep(REFRESH_S)

    def _notice(self, before: Fleet) -> None:
        """Tell of workers that another incarnation replaced at once, and of missing ones after a grace period."""
        now = time.monotonic()
        for worker in before.workers:
            gone = Assignment(worker=worker.id, incarnation=worker.incarnation)
            if self.now.find(worker.id, worker.incarnation) is None:
                self._missing_since.setdefault(gone, now)
        for gone, since in list(self._missing_since.items()):
            if self.now.find(gone.worker, gone.incarnation) is not None:
                del self._missing_since[gone]
            elif now - since >= self._grace_s or any(one.id == gone.worker for one in self.now.workers):
                del self._missing_since[gone]
                log.warning("worker %s is lost", gone.worker)
                self._on_lost(gone)
