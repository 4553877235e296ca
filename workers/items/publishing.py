"""What the cluster is told of this worker's embeddings: that they are here, still here, or gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from app.errors.base import TrivetError
from app.items import ItemRecord
from app.items.index import ItemIndex
from app.messages.plans import Assignment
from app.tensors import segment
from app.tensors.plane import TensorPlane
from workers.embeddings.store import EmbeddingStore

log = logging.getLogger(__name__)

#: An item in use is made to last longer in Redis at most this often, and more often where it lasts but a minute or so.
RENEW_EVERY_S = 60.0

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Published:
    """The records of what is in the store, and their place in the index. `lease_s` is how long a descriptor of ours
    may be used. What the store evicts is withdrawn."""

    def __init__(
        self, me: Assignment, store: EmbeddingStore, plane: TensorPlane, index: ItemIndex, lease_s: float, spawn: Spawn
    ) -> None:
        self._me = me
        self._store = store
        self._plane = plane
        self._index = index
        self._lease_s = lease_s
        self._renew_every_s = min(RENEW_EVERY_S, lease_s / 4)
        self._spawn = spawn
        self._records: dict[str, ItemRecord] = {}
        self._renewed: dict[str, float] = {}
        store.on_evict = self._evicted

    def keep(self, record: ItemRecord) -> None:
        """It is in the store now."""
        self._records[record.identity] = record
        self._renewed[record.identity] = time.monotonic()

    def used(self, identity: str) -> ItemRecord:
        """The record of what is in the store. Use makes it last in Redis."""
        if time.monotonic() - self._renewed[identity] > self._renew_every_s:
            self._renewed[identity] = time.monotonic()
            self.renew(identity)
        return self._records[identity]

    def renew(self, identity: str) -> None:
        """Say in the background (again) that it is here."""
        self._spawn(self._tell(self._renew, identity))

    async def publish(self, record: ItemRecord) -> None:
        """Tell the cluster, and whoever waits for it, that the item is here.

        Raises TensorError, BrokerUnavailable, RecordTooLarge.
        """
        self._store.hold(record.identity)
        try:
            descriptor = await self._plane.publish(self._path(record.identity), self._lease_s)
            await self._index.publish(record.identity, self._me, record, descriptor)
        finally:
            self._store.release(record.identity)

    async def keep_renewed(self) -> None:
        """For ever: give out new descriptors of what is here before the old ones are out of date."""
        while True:
            await asyncio.sleep(self._renew_every_s)
            oldest = time.monotonic() - self._lease_s / 2
            for identity in [one for one, renewed in self._renewed.items() if renewed < oldest]:
                if identity in self._renewed:
                    self._renewed[identity] = time.monotonic()
                    await self._tell(self._renew, identity)

    async def close(self) -> None:
        """Tell the cluster that nothing is here any more."""
        self._store.on_evict = None
        await self._index.withdraw_all(self._me.worker, list(self._records), self._me.incarnation)

    def _evicted(self, identity: str) -> None:
        self._records.pop(identity, None)
        self._renewed.pop(identity, None)
        self._spawn(self._tell(self._withdraw, identity))

    async def _withdraw(self, identity: str) -> None:
        await self._plane.withdraw(self._path(identity))
        if not self._store.has(identity):
            await self._index.withdraw(identity, self._me.worker, self._me.incarnation)

    async def _renew(self, identity: str) -> None:
        """Say (again) that it is here, and make its record last."""
        self._store.hold(identity)
        try:
            if not self._store.has(identity):
                return
            known = (await self._index.find([identity]))[identity]
            if known.record is None:
                # A Redis that was emptied: without the record nobody could use what is here.
                return await self.publish(self._records[identity])
            descriptor = await self._plane.publish(self._path(identity), self._lease_s)
            await self._index.add_holder(identity, self._me, descriptor)
        finally:
            self._store.release(identity)

    def _path(self, identity: str) -> Path:
        return self._store.directory / segment.file_name(identity)

    async def _tell(self, what: Callable[[str], Coroutine[Any, Any, None]], identity: str) -> None:
        """The index is a hint, and readers find out what is wrong in it: no reason for anything to fail."""
        try:
            await what(identity)
        except (TrivetError, OSError) as error:
            log.warning("the index does not hear of item %s: %s", identity, error)
