"""What this worker holds: embeddings in its store, encoded here or brought from other workers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from app.errors.tensors import PeerGone, TensorError, TensorExpired, TensorIncompatible, TensorMissing
from app.items import ItemRecord
from app.items.index import Found, Holder, ItemIndex
from app.messages.plans import Assignment
from app.tensors import segment
from app.tensors.plane import TensorPlane
from app.together import together
from workers.embeddings.file_thread import FileThread
from workers.embeddings.room import Room
from workers.embeddings.store import EmbeddingStore
from workers.items.publishing import Published, Spawn

log = logging.getLogger(__name__)

#: What tells that a holder does not have an embedding. Whatever else goes wrong may be this worker's own trouble, and
#: no reason to take the holder from everybody.
HOLDER_AT_FAULT = (TensorMissing, TensorExpired, TensorIncompatible, PeerGone)

Alive = Callable[[Assignment], Awaitable[bool]]


class NoRoom(Exception):
    """This worker cannot take an embedding in: its store is in use or too small, or its shared memory is in trouble."""


@dataclass
class FetchCounts:
    """Embeddings taken from other workers, and attempts that failed."""

    fetched: int = 0
    failed: int = 0


@dataclass
class Gathered:
    """What could not be brought here: nobody has the `lost` ones any more, and for the `unplaced` there is no room."""

    lost: set[str] = field(default_factory=set)
    unplaced: set[str] = field(default_factory=set)


class LocalItems:
    """Used on the loop that runs the stages only. `lease_s` is how long a descriptor of ours may be used, `alive` tells
    whether a holder can still be asked."""

    def __init__(
        self,
        me: Assignment,
        store: EmbeddingStore,
        plane: TensorPlane,
        index: ItemIndex,
        lease_s: float,
        spawn: Spawn,
        alive: Alive,
    ) -> None:
        self.counts = FetchCounts()
        self.store = store
        self.room = Room(store)
        self._files = FileThread(store)
        self.published = Published(me, store, plane, index, lease_s, spawn)
        self._plane = plane
        self._index = index
        self._spawn = spawn
        self._alive = alive
        self._encoding: set[str] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def get(self, identity: str) -> ItemRecord | None:
        """The item's record, if its embedding is here."""
        path = self.store.path(identity)
        if path is None:
            return None
        if not path.exists():
            log.error("%s, an embedding in use, was deleted by somebody else", path)
            self.store.remove(identity)
            return None
        return self.published.used(identity)

    async def fetch(self, identity: str, found: Found) -> ItemRecord | None:
        """The record of an item that is here, or that somebody holds; None when there is no such holder.

        It is brought here if there is room to spare: it may go again until `gathered` holds it. Raises NoRoom if it
        cannot be had although it is held, and BrokerUnavailable.
        """
        lock = self._lock(identity)
        waits = lock.locked()
        async with lock:
            if self.store.has(identity):
                return self.get(identity)
            if waits:
                # Whoever was first has tried these holders, one by one, and withdrawn them.
                found = (await self._index.find([identity]))[identity]
            holders = await self._living(identity, found)
            if found.record is None or identity in self._encoding or not holders:
                return None
            if not self.room.admit(identity, _total(found.record)):
                return found.record
            return found.record if await self._fill(found.record, holders) else None

    @asynccontextmanager
    async def gathered(self, records: Mapping[str, ItemRecord], timeout_s: float) -> AsyncIterator[Gathered]:
        """Bring these here and hold them; `timeout_s` bounds the wait for room. Raises BrokerUnavailable."""
        sizes = {identity: _total(record) for identity, record in records.items()}
        async with self.room.hold(sizes, timeout_s) as reserved:
            gathered = Gathered(unplaced={one for one in records if not self.store.expects(one)})
            away = [one for one in records if not self.store.has(one) and one not in gathered.unplaced]
            try:
                if away:
                    known = await self._index.find(away)
                    await together(self._gather(one, known[one], reserved, gathered) for one in away)
            finally:
                for identity in reserved:
                    self.store.abandon(identity)
            yield gathered

    async def _gather(self, identity: str, found: Found, reserved: set[str], gathered: Gathered) -> None:
        """Bring one of them here, into the room that is reserved for it, or that somebody else had who failed."""
        async with self._lock(identity):
            if self.store.has(identity):
                return
            holders = await self._living(identity, found)
            if found.record is None or not (identity in reserved or self.room.admit(identity, _total(found.record))):
                gathered.lost.add(identity)
                return
            reserved.discard(identity)
            try:
                if not await self._fill(found.record, holders):
                    gathered.lost.add(identity)
            except NoRoom:
                gathered.unplaced.add(identity)

    def _lock(self, identity: str) -> asyncio.Lock:
        """For whoever brings the item here."""
        return self._locks.setdefault(identity, asyncio.Lock())

    async def _living(self, identity: str, found: Found) -> list[tuple[str, Holder]]:
        """The holders to ask, those of this host first. Dead ones are taken from the index."""
        living = []
        for worker, holder in found.holders.items():
            if await self._alive(Assignment(worker=worker, incarnation=holder.incarnation)):
                living.append((worker, holder))
            else:
                log.info("item %s: its holder %s is gone", identity, worker)
                await self._index.withdraw(identity, worker, holder.incarnation)
        random.shuffle(living)
        return sorted(living, key=lambda one: one[1].descriptor.host != self._plane.host)

    async def _fill(self, record: ItemRecord, holders: list[tuple[str, Holder]]) -> bool:
        """Bring the embedding into the room that was reserved for it, which is given back if none of them has it."""
        try:
            # What had to go for it is deleted first.
            await self._files.settled()
            for worker, holder in holders:
                if await self._fetch_from(record, worker, holder):
                    return True
            return False
        finally:
            if not self.store.has(record.identity):
                self.store.abandon(record.identity)

    async def _fetch_from(self, record: ItemRecord, worker: str, holder: Holder) -> bool:
        identity = record.identity
        try:
            await self._take(record, holder)
        except HOLDER_AT_FAULT as error:
            self._failed(identity, worker, error)
            await self._index.withdraw(identity, worker, holder.incarnation, holder.descriptor.nonce)
            return False
        except TensorError as error:
            self._failed(identity, worker, error)
            raise NoRoom(error.message) from error
        self.published.keep(record)
        self.counts.fetched += 1
        self.published.renew(identity)
        return True

    async def _take(self, record: ItemRecord, holder: Holder) -> None:
        _check(record, holder)
        path = self._path(record.identity)
        await self._plane.fetch(holder.descriptor, path)
        if self.store.commit(record.identity) is None:
            self._spawn(self._plane.withdraw(path))
            raise TensorError("it was not there after it had been fetched")

    def _failed(self, identity: str, worker: str, error: TensorError) -> None:
        self.counts.failed += 1
        log.warning("item %s could not be read from %s: %s: %s", identity, worker, error.code, error.message)

    async def reserve(self, record: ItemRecord) -> bool:
        """Make room at once for an embedding that this worker's engine is going to write; then `commit` or `abandon`.

        False if there is none, or if the item is stored or reserved already: that is another's then.
        """
        if self.store.admit(record.identity, _total(record)) is None:
            return False
        return await self._allocate(record)

    @asynccontextmanager
    async def reserving(self, record: ItemRecord, timeout_s: float) -> AsyncIterator[bool]:
        """The same, but wait for room."""
        async with self.room.hold({record.identity: _total(record)}, timeout_s) as reserved:
            yield bool(reserved) and await self._allocate(record)

    def enough(self, record: ItemRecord, times: int) -> bool:
        """Whether so many items like this one find room without waiting."""
        return self.room.enough(times * _total(record))

    async def _allocate(self, record: ItemRecord) -> bool:
        self._encoding.add(record.identity)
        made = False
        try:
            made = await self._files.allocate(record.identity, _total(record)) is not None
        finally:
            if not made:
                self.abandon(record.identity)
        return made

    def commit(self, record: ItemRecord) -> bool:
        """The engine has encoded the item. False if it did not save it."""
        self._encoding.discard(record.identity)
        if self.store.commit(record.identity) is None:
            return False
        self.published.keep(record)
        return True

    def abandon(self, identity: str) -> None:
        """The engine will not encode it after all."""
        self._encoding.discard(identity)
        self.store.abandon(identity)

    async def close(self) -> None:
        """Tell the cluster that nothing is here any more."""
        try:
            await self.published.close()
        finally:
            await self._files.close()

    def _path(self, identity: str) -> Path:
        return self.store.directory / segment.file_name(identity)


def _total(record: ItemRecord) -> int:
    """Bytes of its embedding in the store."""
    return segment.PAGE + record.embeds * record.width * segment.ITEM_SIZES[record.dtype]


def _check(record: ItemRecord, holder: Holder) -> None:
    descriptor = holder.descriptor
    if descriptor.name != record.identity:
        raise TensorIncompatible(f"the holder's buffer is of {descriptor.name[:64]}")
    if (descriptor.dtype, list(descriptor.shape)) != (record.dtype, [record.embeds, record.width]):
        raise TensorIncompatible(
            f"the record says {record.dtype} {record.embeds} x {record.width}, the holder {descriptor.dtype} "
            f"{' x '.join(map(str, descriptor.shape))}"
        )
