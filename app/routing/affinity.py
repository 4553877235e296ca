"""Which KV blocks an engine holds, where routers see it: a set of block names in Redis for each engine.

The set lives as long as its worker's lease, which every write renews: what a dead worker held is gone with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis.exceptions import RedisError

log = logging.getLogger(__name__)

#: Names in one message: Redis serves nobody else meanwhile.
CHUNK = 1000


@dataclass
class Counts:
    """Writes of a whole set: the first, and those after Redis had lost one; writes that failed; names left out since
    there were too many."""

    rewrites: int = 0
    failed: int = 0
    left_out: int = 0


class HeldBlocks:
    """The names in one set, and their way into Redis.

    `add`, `remove` and `clear` never wait; `run` brings them to Redis, everything of one loop tick together. It begins
    with an empty set, whatever an earlier worker of that name left. That a name is in the set says that the engine
    holds the block and all before it, never the opposite: of more than `most` names those that were not added for the
    longest time are left out.
    """

    def __init__(self, redis: Any, key: str, *, lease_s: float, renew_s: float, most: int) -> None:
        self.counts = Counts()
        self._redis = redis
        self._key = key
        self._lease_ms = max(1, int(lease_s * 1000))
        self._renew_s = renew_s
        self._most = most
        self._held: OrderedDict[str, None] = OrderedDict()
        self._unsent: dict[str, bool] = {}  # name -> whether it is to be there
        self._there = 0  # names that Redis should have
        self._whole = True  # Redis may have anything
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def full(self) -> bool:
        return len(self._held) >= self._most

    def add(self, names: Sequence[str]) -> None:
        """Blocks that follow each other. To add those that are there again keeps them longer; the first one longest,
        since the others are worth nothing without it."""
        for name in reversed(names):
            if name not in self._held:
                self._held[name] = None
                self._note(name, True)
            elif self.full:
                self._held.move_to_end(name)
        while len(self._held) > self._most:
            name, _ = self._held.popitem(last=False)
            self._note(name, False)
            self.counts.left_out += 1

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._held:
                del self._held[name]
                self._note(name, False)

    def clear(self) -> None:
        self._held.clear()
        self._unsent.clear()
        self._whole = True
        self._changed.set()

    async def run(self) -> None:
        """Write what changes, and renew the lease. Tries again, from the beginning, while Redis does not answer."""
        away = False
        while True:
            try:
                await self.write()
                away = False
            except (RedisError, OSError) as error:
                self.counts.failed += 1
                if not away:
                    log.warning("the KV blocks in %s are not up to date: %s", self._key, str(error) or "no answer")
                away = True
            if self._whole:
                await asyncio.sleep(self._renew_s)
            else:
                await self._change_or_renewal()

    async def write(self) -> None:
        """Once. Raises RedisError or OSError; then everything is written again the next time."""
        self._changed.clear()
        try:
            if self._whole:
                await self._rewrite()
            await self._send_unsent()
            while self._unsent and not self._whole:
                await self._send_unsent()
        except (RedisError, OSError):
            self._whole = True
            raise

    async def close(self) -> None:
        """Delete the set. Raises RedisError or OSError."""
        await self._redis.unlink(self._key)

    def _note(self, name: str, there: bool) -> None:
        # A change that was not sent yet is undone by its opposite.
        if self._unsent.pop(name, None) is None:
            self._unsent[name] = there
        self._changed.set()

    async def _change_or_renewal(self) -> None:
        try:
            async with asyncio.timeout(self._renew_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _rewrite(self) -> None:
        """All names, in the place of whatever Redis has."""
        self.counts.rewrites += 1
        self._whole = False
        self._unsent.clear()
        names = list(self._held)
        await self._redis.unlink(self._key)
        self._there = 0
        for i in range(0, len(names), CHUNK):
            if not self._whole:
                await self._send(names[i : i + CHUNK], [])

    async def _send_unsent(self) -> None:
        """A message of changes, or none, which only renews the lease."""
        changes = [(name, self._unsent.pop(name)) for name in list(islice(self._unsent, CHUNK))]
        added = [name for name, there in changes if there]
        await self._send(added, [name for name, there in changes if not there])

    async def _send(self, added: list[str], removed: list[str]) -> None:
        # One step, or a worker that dies between two commands leaves a set for ever.
        pipe = self._redis.pipeline(transaction=True)
        if added:
            pipe.sadd(self._key, *added)
        if removed:
            pipe.srem(self._key, *removed)
        pipe.pexpire(self._key, self._lease_ms)
        pipe.scard(self._key)
        *_, found = await pipe.execute()
        self._there += len(added) - len(removed)
        if found != self._there and not self._whole:
            log.warning("Redis has %d of the %d KV blocks in %s: all are written anew", found, self._there, self._key)
            self._whole = True
