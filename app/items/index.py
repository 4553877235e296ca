"""What the cluster knows of each item: its record, who holds its embedding, and who is to encode it.

Whoever wants an item looks it up, and either takes its embedding from a holder, or waits for the worker that has
claimed it, or claims it for a worker. There is one claim on an item at a time, so it is encoded once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import ValidationError

from app import keys
from app.errors.base import Failure
from app.errors.serving import BrokerUnavailable, RecordTooLarge
from app.items.announcements import announcement, is_final
from app.items.record import ItemRecord
from app.items.scripts import CLAIM, FIND, GIVE_UP, HOLD, PUBLISH, WITHDRAW, Scripts
from app.messages.base import Message
from app.messages.plans import Assignment
from app.messages.tensors import Descriptor
from app.settings_sections import ItemSettings

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

#: Entries that one script removes: Redis serves nobody else meanwhile.
WITHDRAWN_AT_ONCE = 500


class Holder(Message):
    """A worker's copy of an embedding. Whether that incarnation still lives is for the reader to know."""

    incarnation: str
    descriptor: Descriptor


@dataclass(frozen=True)
class Found:
    """What is known of an item. `holders` are by worker id; `claim` is the worker that is to encode it."""

    record: ItemRecord | None = None
    holders: dict[str, Holder] = field(default_factory=dict)
    claim: Assignment | None = None


class Outcome(StrEnum):
    """The answer to a claim: the item has a record and a holder, another claim stands, or the claim was made."""

    HELD = "held"
    CLAIMED = "claimed"
    YOURS = "yours"


@dataclass(frozen=True)
class ClaimAnswer:
    """`found` is what the index knows once the claim is decided: its `claim` is the one that stands, if one does."""

    outcome: Outcome
    found: Found


class ItemIndex:
    """The items of one model: `namespace` is its fingerprint. `redis` is an asyncio client.

    All calls of one loop tick share a round trip, and all raise BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, redis: Any, namespace: str, settings: ItemSettings) -> None:
        self.namespace = namespace
        self._scripts = Scripts(redis)
        self._ttl_s = settings.record_ttl_s
        self._max_record_kb = settings.max_record_kb
        self._undoing: set[asyncio.Task[None]] = set()
        self._unreadable: set[str] = set()

    async def find(self, identities: Sequence[str]) -> dict[str, Found]:
        """What is known of each; an item that nobody knows is an empty `Found`. What was found lives on."""
        wanted = list(dict.fromkeys(identities))
        if not wanted:
            return {}
        names = [name for identity in wanted for name in self._names(identity)]
        answers = await self._scripts.run(FIND, names, self._ttl_s)
        return {identity: self._found(*answer) for identity, answer in zip(wanted, answers, strict=True)}

    async def claim(
        self, identity: str, owner: Assignment, ttl_s: float, instead_of: Assignment | None = None
    ) -> ClaimAnswer:
        """Take the encoding on for `owner`, for `ttl_s`, unless the item is held, or claimed by any but `instead_of`.

        A standing claim of the same owner is a claim too: somebody else has told that worker. If the caller is
        cancelled meanwhile, the claim is given up.
        """
        asking = asyncio.create_task(self._claim(identity, owner, ttl_s, instead_of))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda done: self._undo(done, identity, owner))
            raise

    async def owns(self, identity: str, owner: Assignment) -> bool:
        """Whether the claim is (still) the owner's. Whoever lost it leaves the item to the one that took it over."""
        claim = await self._scripts.get(keys.encoding(self.namespace, identity))
        return claim is not None and self._claim_in(claim) == owner

    async def publish(self, identity: str, owner: Assignment, record: ItemRecord, descriptor: Descriptor) -> None:
        """Say that `owner` has encoded the item: record, holder, no claim of the owner's any more, announcement.

        Raises RecordTooLarge, which changes nothing: the claim is still to be given up.
        """
        text = record.model_dump_json().encode()
        if len(text) > self._max_record_kb * 1024:
            raise RecordTooLarge(
                f"the record of item {identity} has {len(text)} bytes, more than items.max_record_kb "
                f"({self._max_record_kb}) allows: raise it"
            )
        said = announcement(self.namespace, identity, owner)
        holder = _holder(owner, descriptor)
        arguments = (owner.worker, owner.incarnation, text, holder, self._ttl_s, keys.ITEMS_CHANNEL, said)
        await self._scripts.run(PUBLISH, self._names(identity), *arguments)

    async def add_holder(self, identity: str, owner: Assignment, descriptor: Descriptor) -> None:
        """Say that `owner` holds the embedding too. Nobody waits for this, so it is not announced."""
        name = keys.embedding(self.namespace, identity)
        await self._scripts.run(HOLD, [name], owner.worker, _holder(owner, descriptor), self._ttl_s)

    async def withdraw(
        self, identity: str, worker_id: str, incarnation: str | None = None, nonce: str | None = None
    ) -> bool:
        """Remove a holder that evicted the embedding, or was found dead or without it. Answers whether it was removed.

        With `incarnation`, or the `nonce` of the descriptor that failed, an entry that replaced the one meant stays.
        """
        return bool(await self._withdraw([identity], worker_id, incarnation, nonce))

    async def withdraw_all(self, worker_id: str, identities: Sequence[str], incarnation: str | None = None) -> int:
        """Remove a worker from the holders of these items. Answers how many it was removed from."""
        starts = range(0, len(identities), WITHDRAWN_AT_ONCE)
        parts = [identities[start : start + WITHDRAWN_AT_ONCE] for start in starts]
        return sum([await self._withdraw(part, worker_id, incarnation, None) for part in parts])

    async def give_up(self, identity: str, owner: Assignment, failure: Failure | None = None) -> None:
        """Give the owner's claim up and announce why; without a failure, waiters look again and one claims the item.

        If another has the claim by now, only a failure that is the item's own fault is announced.
        """
        said = announcement(self.namespace, identity, owner, failure)
        final = int(failure is not None and is_final(failure))
        arguments = (owner.worker, owner.incarnation, final, keys.ITEMS_CHANNEL, said)
        await self._scripts.run(GIVE_UP, [keys.encoding(self.namespace, identity)], *arguments)

    async def _claim(
        self, identity: str, owner: Assignment, ttl_s: float, instead_of: Assignment | None
    ) -> ClaimAnswer:
        nonce = secrets.token_hex(8)
        claim = json.dumps(owner.model_dump() | {"nonce": nonce})
        old = instead_of or Assignment(worker="", incarnation="")
        arguments = (claim, max(1, int(ttl_s * 1000)), nonce, old.worker, old.incarnation)
        outcome, *known = await self._scripts.run(CLAIM, self._names(identity), *arguments, 0)
        found = self._found(*known)
        if Outcome(outcome.decode()) is Outcome.HELD and not (found.record and found.holders):
            # By what another version wrote, which nobody here can use.
            outcome, *known = await self._scripts.run(CLAIM, self._names(identity), *arguments, 1)
            found = self._found(*known)
        return ClaimAnswer(Outcome(outcome.decode()), found)

    def _undo(self, asked: asyncio.Task[ClaimAnswer], identity: str, owner: Assignment) -> None:
        if asked.cancelled() or asked.exception() is not None or asked.result().outcome is not Outcome.YOURS:
            return
        task = asyncio.create_task(self._give_back(identity, owner))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _give_back(self, identity: str, owner: Assignment) -> None:
        try:
            await self.give_up(identity, owner)
        except BrokerUnavailable as error:
            log.warning("item %s stays claimed until the claim runs out: %s", identity, error)

    async def _withdraw(
        self, identities: Sequence[str], worker_id: str, incarnation: str | None, nonce: str | None
    ) -> int:
        names = [keys.embedding(self.namespace, identity) for identity in identities]
        return int(await self._scripts.run(WITHDRAW, names, worker_id, incarnation or "", nonce or ""))

    def _names(self, identity: str) -> list[str]:
        return [kind(self.namespace, identity) for kind in (keys.item, keys.embedding, keys.encoding)]

    def _found(self, record: bytes | None, holders: list[bytes], claim: bytes | None) -> Found:
        held = {
            worker.decode(errors="replace"): self._parse(Holder, text)
            for worker, text in zip(holders[::2], holders[1::2], strict=True)
        }
        return Found(
            record=None if record is None else self._parse(ItemRecord, record),
            holders={worker: holder for worker, holder in held.items() if holder is not None},
            claim=None if claim is None else self._claim_in(claim),
        )

    def _parse(self, kind: type[M], text: bytes) -> M | None:
        """The message; None, which is said once, if it is none: another version's is as good as absent."""
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            self._say_unreadable(
                kind.__name__,
                str([(one["loc"], one["type"]) for one in error.errors(include_input=False, include_url=False)]),
            )
            return None

    def _claim_in(self, text: bytes) -> Assignment | None:
        """Read as the scripts do: an owner, and whatever else."""
        try:
            claim = json.loads(text)
            return Assignment(worker=claim["worker"], incarnation=claim["incarnation"])
        except (ValueError, LookupError, TypeError) as error:
            self._say_unreadable("claim", type(error).__name__)
            return None

    def _say_unreadable(self, kind: str, details: str) -> None:
        if kind not in self._unreadable:
            log.error("unreadable %s of an item of %s (another version of Trivet?): %s", kind, self.namespace, details)
        self._unreadable.add(kind)


def _holder(owner: Assignment, descriptor: Descriptor) -> str:
    return Holder(incarnation=owner.incarnation, descriptor=descriptor).model_dump_json()
