"""What this worker holds: embeddings in its store, their records, and what the cluster is told of both."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from app.errors import PeerGone, TensorError, TensorExpired, TensorIncompatible, TensorMissing, TrivetError
from app.items import ItemRecord
from app.items.index import Found, Holder, ItemIndex
from app.messages import Assignment
from app.tensors import segment
from app.tensors.plane import TensorPlane
from workers.embeddings.store import EmbeddingStore

log = logging.getLogger(__name__)

#: An item in use is made to last longer in Redis at most this often.
RENEW_EVERY_S = 60.0
#: What tells that a holder does not have an embedding. Whatever else goes wrong may be this worker's own trouble, and
#: no reason to take the holder from everybody.
HOLDER_AT_FAULT = (TensorMissing, TensorExpired, TensorIncompatible, PeerGone)

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class NoRoom(Exception):
    """This worker cannot take an embedding in: its store is in use or too small, or its shared memory is in trouble."""


@dataclass
class FetchCounts:
    """Embeddings taken from other workers, and attempts that failed."""

    fetched: int = 0
    failed: int = 0


class LocalItems:
    """Used on the loop that runs the stages only. `lease_s` is how long a descriptor of ours may be used."""

    def __init__(
        self,
        me: Assignment,
        store: EmbeddingStore,
        plane: TensorPlane,
        index: ItemIndex,
        lease_s: float,
        spawn: Spawn,
    ) -> None:
        self.counts = FetchCounts()
        self.store = store
        self._me = me
        self._plane = plane
        self._index = index
        self._lease_s = lease_s
        self._spawn = spawn
        self._records: dict[str, ItemRecord] = {}
        self._renewed: dict[str, float] = {}
        self._encoding: set[str] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        store.on_evict = self._evicted

    def get(self, identity: str) -> ItemRecord | None:
        """The item's record, if its embedding is here."""
        path = self.store.path(identity)
        if path is None:
            return None
        if not path.exists():
            log.error("%s, an embedding in use, was deleted by somebody else", path)
            self.store.remove(identity)
            return None
        if time.monotonic() - self._renewed[identity] > RENEW_EVERY_S:
            self._renewed[identity] = time.monotonic()
            self._spawn(self._tell(self._renew, identity))
        return self._records[identity]

    def lock(self, identity: str) -> asyncio.Lock:
        """For whoever brings the item here, or encodes it for others."""
        return self._locks.setdefault(identity, asyncio.Lock())

    async def fetch(self, identity: str, found: Found) -> ItemRecord | None:
        """Bring the embedding here from whoever holds it; None when no holder could give it.

        Raises NoRoom, BrokerUnavailable.
        """
        lock = self.lock(identity)
        waits = lock.locked()
        async with lock:
            if self.store.has(identity):
                return self.get(identity)
            if waits:
                # Whoever was first has tried these holders, one by one, and withdrawn them.
                found = (await self._index.find([identity]))[identity]
            if found.record is None or identity in self._encoding:
                return None
            holders = list(found.holders.items())
            random.shuffle(holders)
            for worker, holder in holders:
                if await self._fetch_from(found.record, worker, holder):
                    return found.record
            return None

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
        self._keep(record)
        self.counts.fetched += 1
        self._spawn(self._tell(self._renew, identity))
        return True

    async def _take(self, record: ItemRecord, holder: Holder) -> None:
        _check(record, holder)
        path = self.store.admit(record.identity, segment.PAGE + holder.descriptor.nbytes)
        if path is None:
            raise NoRoom("the embedding cache is full, or too small for it")
        try:
            await self._plane.fetch(holder.descriptor, path)
        except BaseException:
            self.store.abandon(record.identity)
            raise
        if self.store.commit(record.identity) is None:
            await self._plane.withdraw(path)
            raise TensorError("it was not there after it had been fetched")

    def _failed(self, identity: str, worker: str, error: TensorError) -> None:
        self.counts.failed += 1
        log.warning("item %s could not be read from %s: %s: %s", identity, worker, error.code, error.message)

    def reserve(self, record: ItemRecord) -> bool:
        """Make room for an embedding that this worker's engine is going to write; then `commit` or `abandon`.

        False if there is none, or if the item is stored or reserved already: that is another's then.
        """
        nbytes = record.embeds * record.width * segment.ITEM_SIZES[record.dtype]
        if self.store.reserve(record.identity, segment.PAGE + nbytes) is None:
            return False
        self._encoding.add(record.identity)
        return True

    def commit(self, record: ItemRecord) -> bool:
        """The engine has encoded the item. False if it did not save it."""
        self._encoding.discard(record.identity)
        if self.store.commit(record.identity) is None:
            return False
        self._keep(record)
        return True

    def abandon(self, identity: str) -> None:
        """The engine will not encode it after all."""
        self._encoding.discard(identity)
        self.store.abandon(identity)

    async def publish(self, record: ItemRecord) -> None:
        """Tell the cluster, and whoever waits for it, that the item is here.

        Raises TensorError, BrokerUnavailable, RecordTooLarge.
        """
        self.store.hold(record.identity)
        try:
            descriptor = await self._plane.publish(self._path(record.identity), self._lease_s)
            await self._index.publish(record.identity, self._me, record, descriptor)
        finally:
            self.store.release(record.identity)

    async def close(self) -> None:
        """Tell the cluster that nothing is here any more."""
        self.store.on_evict = None
        await self._index.withdraw_all(self._me.worker, list(self._records), self._me.incarnation)

    def _keep(self, record: ItemRecord) -> None:
        self._records[record.identity] = record
        self._renewed[record.identity] = time.monotonic()

    def _evicted(self, identity: str) -> None:
        self._records.pop(identity, None)
        self._renewed.pop(identity, None)
        self._spawn(self._tell(self._withdraw, identity))

    async def _withdraw(self, identity: str) -> None:
        await self._plane.withdraw(self._path(identity))
        if not self.store.has(identity):
            await self._index.withdraw(identity, self._me.worker, self._me.incarnation)

    async def _renew(self, identity: str) -> None:
        """Say (again) that it is here, and make its record last."""
        self.store.hold(identity)
        try:
            if not self.store.has(identity):
                return
            known = (await self._index.find([identity]))[identity]
            if known.record is None:
                # A Redis that was emptied: without the record nobody could use what is here.
                return await self.publish(self._records[identity])
            descriptor = await self._plane.publish(self._path(identity), self._lease_s)
            await self._index.add_holder(identity, self._me, descriptor)
        finally:
            self.store.release(identity)

    def _path(self, identity: str) -> Path:
        return self.store.directory / segment.file_name(identity)

    async def _tell(self, what: Callable[[str], Coroutine[Any, Any, None]], identity: str) -> None:
        """The index is a hint, and readers find out what is wrong in it: no reason for anything to fail."""
        try:
            await what(identity)
        except (TrivetError, OSError) as error:
            log.warning("the index does not hear of item %s: %s", identity, error)


def _check(record: ItemRecord, holder: Holder) -> None:
    descriptor = holder.descriptor
    if descriptor.name != record.identity:
        raise TensorIncompatible(f"the holder's buffer is of {descriptor.name[:64]}")
    if (descriptor.dtype, list(descriptor.shape)) != (record.dtype, [record.embeds, record.width]):
        raise TensorIncompatible(
            f"the record says {record.dtype} {record.embeds} x {record.width}, the holder {descriptor.dtype} "
            f"{' x '.join(map(str, descriptor.shape))}"
        )
