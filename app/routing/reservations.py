"""What is placed where: `trivet:placed:<api>` has every request's places, `trivet:load:...` their sums.

Routers add places. Each of these calls is one step that may be sent twice, and all raise RedisError or OSError.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any

from app import keys
from app.messages.plans import Assignment
from app.routing.lua import PREFILLED, REAP, RELEASE
from app.tick import Tick

log = logging.getLogger(__name__)

#: Requests of API processes that are gone, given back at a time: Redis serves nobody else meanwhile.
REAPED_AT_ONCE = 100


class Reservations:
    """`redis` is an asyncio client; all calls of one loop tick share a round trip.

    `owner_lease_s` is how long an API process has to be gone, after its own lease, before its places are given back.
    """

    def __init__(self, redis: Any, owner_lease_s: float) -> None:
        self._tick = Tick(redis)
        self._owner_lease_s = owner_lease_s
        self._strays: set[str] = set()

    async def prefilled(self, owner: str, request_id: str) -> None:
        """A request that prefills and decodes on one worker has its first token: nothing of it is left to prefill."""
        await PREFILLED.run(self._tick, [keys.placed(owner)], request_id)

    async def release(self, owner: str, request_id: str, *places: str) -> None:
        """Give the request's places back: all, or those of these names (an identity for an item's encode task)."""
        await RELEASE.run(self._tick, [keys.placed(owner)], request_id, *places)

    async def placed_on(self, owner: str, worker: Assignment) -> list[str]:
        """The owner's requests that prefill or decode on this incarnation of a worker. Reads them all: for rare use."""
        found = await self._tick.run("HGETALL", keys.placed(owner))
        entries = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        return [request.decode() for request, text in entries if worker in _runs_on(text)]

    async def reap(self) -> int:
        """Give back what API processes left behind that are gone, a bounded number of requests. Answers how many."""
        prefixes = keys.api(""), keys.placed("")
        reaped = await REAP.run(self._tick, [keys.OWNERS], self._owner_lease_s, REAPED_AT_ONCE, *prefixes)
        if reaped:
            log.warning("the places of %d requests given back: their API processes are gone", reaped)
        return int(reaped)

    async def sweep(self, owner: str, running: Collection[str]) -> int:
        """Give back places of the owner's that none of its `running` requests has: a decision that was waited for no
        longer may have been taken all the same. One has to be found in two calls. Answers how many."""
        placed = {one.decode() for one in await self._tick.run("HKEYS", keys.placed(owner))}
        strays = placed - set(running)
        lost = strays & self._strays
        for request_id in lost:
            await self.release(owner, request_id)
        self._strays = strays - lost
        return len(lost)

    async def leave(self, owner: str) -> None:
        """The owner has ended: give back whatever it had."""
        for request_id in await self._tick.run("HKEYS", keys.placed(owner)):
            await self.release(owner, request_id.decode())
        await self._tick.run("ZREM", keys.OWNERS, owner)


def _runs_on(text: bytes) -> list[Assignment]:
    places: dict[str, dict[str, Any]] = json.loads(text)["places"]
    named = [places[stage] for stage in ("whole", "prefill", "decode") if stage in places]
    return [Assignment(worker=one["worker"], incarnation=one["incarnation"]) for one in named]
