"""One item for a prompt: from this worker's store, from a holder, from an encode worker, or encoded here.

One encode at a time per item in the whole cluster: whoever finds neither a holder nor a claim in the index takes the
claim, for an encode worker or for itself, and everybody else waits for what is announced.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field

from app import keys
from app.celery import ENCODE_TASK
from app.errors.base import Failure, RemoteFailure
from app.errors.serving import BrokerUnavailable
from app.fleet import FleetView
from app.items import ItemRecord
from app.items.announcements import Announcements, Watch, is_final
from app.items.index import ItemIndex, Outcome
from app.messages.media import MediaRef
from app.messages.plans import Assignment
from app.messages.tasks import EncodeTask, StageTask
from app.registry import WorkerRecord
from app.roles import Role
from app.sender import TaskSender
from workers.items.encoder import ItemEncoder, OwnItem, gone
from workers.items.local import LocalItems, NoRoom
from workers.items.turns import Turns

log = logging.getLogger(__name__)

#: Longest wait before the index is asked again: an announcement may be lost, an owner may die.
LOOK_AGAIN_S = 1.0
#: The same after another one was quicker to claim the item, or to encode it.
SOON_S = 0.05


@dataclass
class FinderCounts:
    """How items were come by. `sent_again` and `fallbacks` are encodes that an encode worker owed and did not give,
    `no_room` are embeddings that others had and this worker could not take in."""

    here: int = 0
    waited: int = 0
    encoded_here: int = 0
    sent_again: int = 0
    fallbacks: int = 0
    no_room: int = 0


@dataclass
class Search:
    """How far the search for one item of a prompt has come.

    `tried` are encode workers that failed; `since` says when each owner of the claim was first waited for, and `owner`
    is the last of them.
    """

    task: StageTask
    ref: MediaRef
    turns: Turns
    began: float = field(default_factory=time.monotonic)
    tried: set[str] = field(default_factory=set)
    since: dict[Assignment, float] = field(default_factory=dict)
    owner: Assignment | None = None

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    def heed(self, failure: Failure) -> None:
        """One that is the medium's own fault is this request's, too; after any other one there are other ways."""
        if is_final(failure):
            raise RemoteFailure(Failure(failure.status, failure.code, failure.message, self.ref.param))
        if self.owner is not None:
            self.tried.add(self.owner.worker)


class ItemFinder:
    """`timeout_s` bounds the wait for one worker; `encodes` says that encoding here is nothing out of the ordinary.

    Encode workers are asked during the first `timeout_s` of a search. After twice that an item is encoded here whoever
    else is at it.
    """

    def __init__(
        self,
        me: Assignment,
        encoder: ItemEncoder,
        local: LocalItems,
        index: ItemIndex,
        announcements: Announcements,
        fleet: FleetView,
        sender: TaskSender,
        timeout_s: float,
        encodes: bool,
    ) -> None:
        self.counts = FinderCounts()
        self._me = me
        self._encoder = encoder
        self._local = local
        self._index = index
        self._announcements = announcements
        self._fleet = fleet
        self._sender = sender
        self.timeout_s = timeout_s
        self._encodes = encodes

    async def find(self, task: StageTask, ref: MediaRef, turns: Turns) -> ItemRecord | OwnItem:
        """The record of an item whose embedding is here or with another worker, or the item to encode with the prompt.

        `turns` are those of the prompt's items. Raises MediaRefused, RemoteFailure (an encode worker refused the
        medium), BrokerUnavailable, MediaExpired, EncodeFailed.
        """
        here = self._local.get(ref.identity)
        if here is not None:
            self.counts.here += 1
            return here
        search = Search(task, ref, turns)
        with self._announcements.watch(self._index.namespace, ref.identity) as watch:
            try:
                got = await self._search(search, watch)
            except NoRoom as reason:
                return await self.without_room(ref, str(reason))
        if got is None:
            turns.settle(ref.identity)
            return await self.encode_here(ref, claimed=False)
        return got

    async def without_room(self, ref: MediaRef, why: str) -> OwnItem:
        """The item to be encoded with its prompt, since its embedding cannot be taken in. Raises as `find` does."""
        self.counts.no_room += 1
        log.info("item %s is encoded with its prompt, and not kept: %s", ref.identity, why)
        return await self.encode_here(ref, claimed=False)

    async def _search(self, search: Search, watch: Watch) -> ItemRecord | OwnItem | None:
        """None when the time is up. Raises NoRoom when the embedding cannot be had here."""
        identity = search.ref.identity
        while (left := 2 * self.timeout_s - search.age) > 0:
            found = (await self._index.find([identity]))[identity]
            self._check(found.record)
            record = await self._local.fetch(identity, found)
            if record is not None:
                return record
            pause = LOOK_AGAIN_S
            if not await self._waits_for(search, found.claim):
                own = await self._take_on(search, found.claim)
                if own is not None:
                    return own
                pause = SOON_S
            failure = await watch.wait(min(pause, left))
            if failure is not None:
                search.heed(failure)
        log.warning("item %s was not to be had from others within %g s", identity, search.age)
        return None

    def _check(self, record: ItemRecord | None) -> None:
        if record is not None and not self._encoder.fits(record):
            log.error("the record of item %s is of another model (embeddings %d wide)", record.identity, record.width)
            raise NoRoom("its record is of another model")

    async def _waits_for(self, search: Search, claim: Assignment | None) -> bool:
        """Whether the owner of the claim may still be expected to encode the item."""
        if claim is None or not await self.alive(claim):
            return False
        if not search.since:
            self.counts.waited += 1
        search.owner = claim
        if time.monotonic() - search.since.setdefault(claim, time.monotonic()) < self.timeout_s:
            return True
        if claim.worker not in search.tried:
            log.warning("%s did not encode item %s within %g s", claim.worker, search.ref.identity, self.timeout_s)
            search.tried.add(claim.worker)
        return False

    async def alive(self, worker: Assignment) -> bool:
        """Whether something may be expected of it."""
        return worker == self._me or await self._fleet.knows(worker)

    async def _take_on(self, search: Search, instead_of: Assignment | None) -> OwnItem | None:
        """Nobody is at it: claim the item for an encode worker that has not failed yet, or encode it here."""
        ref = search.ref
        if ref.source is None:
            raise gone(ref)
        encode_worker = self._encode_worker(search)
        if encode_worker is None:
            await search.turns.wait(ref.identity)
        owner = encode_worker or self._me
        answer = await self._index.claim(ref.identity, owner, self.timeout_s, instead_of=instead_of)
        if answer.outcome is not Outcome.YOURS:
            return None
        if encode_worker is None:
            search.turns.settle(ref.identity)
            return await self.encode_here(ref, claimed=True)
        search.owner = owner
        search.tried.add(owner.worker)
        self.counts.sent_again += 1
        log.warning("item %s goes to encode worker %s", ref.identity, owner.worker)
        await self._send(search.task, ref, owner)
        return None

    def _encode_worker(self, search: Search) -> Assignment | None:
        if search.age >= self.timeout_s:
            return None
        encoders = [one for one in self._fleet.now.encoders(self._index.namespace) if one.id not in search.tried]
        return min(encoders, key=_load).assignment if encoders else None

    async def _send(self, task: StageTask, ref: MediaRef, owner: Assignment) -> None:
        known = task.model_dump(include={"request_id", "attempt", "api", "model", "deadline"})
        encode = EncodeTask(item=ref, assigned=owner, **known)
        try:
            await self._sender.send(ENCODE_TASK, encode, keys.worker_queue(Role.ENCODE, owner.worker))
        except BrokerUnavailable:
            await self._encoder.give_up(ref.identity, None, owner)
            raise

    async def encode_here(self, ref: MediaRef, *, claimed: bool) -> OwnItem:
        """The item to be encoded with its prompt; `claimed` if others wait for it. Raises as `find` does."""
        self.counts.encoded_here += 1
        if self._fleet.now.encoders(self._index.namespace) or not self._encodes:
            self.counts.fallbacks += 1
            log.warning("item %s is encoded by this worker, which prefills", ref.identity)
        try:
            own = await self._encoder.prepare(ref)
        except BaseException as error:
            if claimed:
                self._encoder.leave(ref.identity, error)
            raise
        own.claimed = claimed
        return own


def _load(worker: WorkerRecord) -> tuple[int, float]:
    return worker.in_flight, random.random()
