"""Items that this worker encodes itself: from a reference to what its engine takes, and to what others are told."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from app.errors.base import Failure, TrivetError
from app.errors.media import MediaExpired, MediaRefused
from app.errors.serving import BrokerUnavailable, EncodeFailed
from app.errors.tensors import PeerGone, TensorExpired, TensorMissing
from app.items import ItemRecord
from app.items.index import ItemIndex
from app.messages.media import MediaRef, Modality
from app.messages.plans import Assignment
from app.settings_media import MediaSettings
from app.tensors.plane import TensorPlane
from app.tensors.segment import ITEM_SIZES
from app.threads import unbroken
from app.together import together
from workers import media_loading
from workers.decoded_size import decoded_size
from workers.engine import Engine
from workers.items.arrivals import Arrival, Arrivals
from workers.items.decoded import DecodedMemory
from workers.items.local import LocalItems
from workers.items.publishing import Spawn

log = logging.getLogger(__name__)

#: Encode tasks between reading their item and announcing it. Each has a decoded medium in memory, and an engine's step
#: takes fewer.
AT_ONCE = 32


@dataclass(frozen=True)
class Width:
    """What the engine's encoder gives for each placeholder token: `width` values of `dtype`. `target` is what stands
    for an item in a prompt that is not expanded."""

    width: int
    dtype: str
    target: tuple[int, ...] = ()


@dataclass(frozen=True)
class ItemSource:
    """What records say of where they come from: the model, its revision, its processor settings."""

    model: str
    revision: str | None
    processor: dict[str, object]


@dataclass
class OwnItem:
    """An item on its way through this worker's encoder. `alone` is a prompt of the item only, as the engine takes it,
    `kwargs` the item's processor outputs with its pixels, to be put into another prompt.

    `reserved` says that there is room for the embedding, which the engine has still to write, and `stored` that it has;
    `claimed` that others wait for this worker to encode it; `announced` that they know.
    """

    record: ItemRecord
    alone: Any
    kwargs: Any
    reserved: bool = False
    stored: bool = False
    claimed: bool = False
    announced: bool = False


class ItemEncoder:
    """`widths` by modality; made by the self-check at the start."""

    def __init__(
        self,
        me: Assignment,
        engine: Engine,
        plane: TensorPlane,
        local: LocalItems,
        index: ItemIndex,
        source: ItemSource,
        limits: MediaSettings,
        spawn: Spawn,
    ) -> None:
        self.widths: dict[Modality, Width] = {}
        self.arrivals = Arrivals()
        self.slots = asyncio.Semaphore(AT_ONCE)
        self.decoded = DecodedMemory(int(limits.decoded_mb * 1e6))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._me = me
        self._engine = engine
        self._plane = plane
        self._local = local
        self._index = index
        self._source = source
        self._limits = limits
        self._spawn = spawn

    def lock(self, identity: str) -> asyncio.Lock:
        """For whoever encodes the item for others."""
        return self._locks.setdefault(identity, asyncio.Lock())

    def fits(self, record: ItemRecord) -> bool:
        """Whether the engine can use an embedding of this record: another width would be its end."""
        own = self.widths.get(record.modality)
        return record.dtype in ITEM_SIZES and (own is None or own.width == record.width)

    @asynccontextmanager
    async def loaded(self, refs: Sequence[MediaRef]) -> AsyncIterator[list[Any]]:
        """The decoded media, which are in this worker's memory for them inside the block, and not to be kept.

        Raises MediaRefused, MediaExpired, TensorError. Who is cancelled meanwhile waits for what is being decoded. What
        the model's processor has goes on in its one thread, at most one prompt's media beyond the limit.
        """
        contents = await together(self._read(ref) for ref in refs)
        sizes = await together(
            asyncio.to_thread(decoded_size, ref, content, self._limits)
            for ref, content in zip(refs, contents, strict=True)
        )
        async with self.decoded.taking(sum(sizes)):
            io_kwargs = self._engine.renderer.media_io_kwargs
            yield await together(
                unbroken(functools.partial(media_loading.load, ref, content, io_kwargs, self._limits))
                for ref, content in zip(refs, contents, strict=True)
            )

    async def _read(self, ref: MediaRef) -> Any:
        if ref.source is None:
            raise gone(ref)
        try:
            return await self._plane.read(ref.source)
        except (TensorMissing, TensorExpired, PeerGone) as error:
            raise gone(ref) from error

    async def prepare(self, ref: MediaRef) -> OwnItem:
        """Read, decode and render the item. Raises what `loaded` does."""
        width = self.widths.get(ref.modality)
        if width is None:
            raise MediaRefused(f"the model takes no {ref.modality}", param=ref.param)
        async with self.loaded([ref]) as (data,):
            alone = await self._engine.renderer.item(ref, data)
        self.check_tokens(ref, alone.embeds)
        record = alone.record(
            width=width.width, dtype=width.dtype, worker=self._me.worker, **dataclasses.asdict(self._source)
        )
        return OwnItem(record, alone.engine_input, alone.kwargs)

    def check_tokens(self, ref: MediaRef, embeds: int) -> None:
        """Raise MediaRefused if the medium has become too many tokens with an embedding."""
        allowed = self._limits.max_item_tokens
        if embeds > allowed:
            raise MediaRefused(
                f"the {ref.modality} takes {embeds} tokens, more than media.max_item_tokens allows ({allowed})",
                param=ref.param,
            )

    async def reserve(self, own: OwnItem) -> None:
        """Make room for the embedding of an item that is encoded with its prompt; the caller holds it in the store.

        Without room it is not kept: who waits for it is told so, since the prompt may take long.
        """
        own.reserved = await self._local.reserve(own.record)
        if not own.reserved:
            self.disclaim(own)

    def disclaim(self, own: OwnItem) -> None:
        """Let others who wait for the item look for another way."""
        if own.claimed:
            own.claimed = False
            self.leave(own.record.identity, None)

    @asynccontextmanager
    async def reserving(self, own: OwnItem, arrival: Arrival, timeout_s: float) -> AsyncIterator[None]:
        """Wait for room for the embedding, and hold it; what came of it is announced inside the block, or given up."""
        await arrival.turn(lambda items: self._local.enough(own.record, items))
        arrival.settle()
        async with self._local.reserving(own.record, timeout_s) as own.reserved:
            try:
                yield
            finally:
                self._abandon(own)

    async def announce(self, own: OwnItem) -> None:
        """The engine has seen the item: whoever waits for it may have it.

        Raises EncodeFailed if it was not kept, or what `LocalItems.publish` raises.
        """
        if own.announced:
            return
        if own.reserved:
            own.reserved = False
            own.stored = self._local.commit(own.record)
        if not own.stored:
            raise EncodeFailed("the engine saved no embedding: their cache is full or too small, or KV blocks had all")
        await self._local.published.publish(own.record)
        own.announced = True

    async def share(self, own: OwnItem) -> None:
        """Announce an item that was encoded with a prompt, whose answer does not depend on it.

        If that fails, those who wait for it are told to look elsewhere.
        """
        try:
            await self.announce(own)
        except TrivetError as error:
            log.info("item %s of a prompt is not shared: %s: %s", own.record.identity, error.code, error.message)
            if own.claimed:
                own.claimed = False
                await self.give_up(own.record.identity, None)

    def drop(self, own: OwnItem) -> None:
        """Its prompt is over. What the engine has written by now is shared all the same: it is of use to others."""
        if not own.announced and (own.reserved or own.stored or own.claimed):
            self._spawn(self.share(own))

    def _abandon(self, own: OwnItem) -> None:
        """Give its room back, if nothing came of it."""
        if own.reserved:
            own.reserved = False
            self._local.abandon(own.record.identity)

    def leave(self, identity: str, error: BaseException | None) -> None:
        """This worker does not encode the item after all: see `reason`. It is said even if the caller is cancelled."""
        self._spawn(self.give_up(identity, reason(error)))

    async def give_up(self, identity: str, failure: Failure | None, owner: Assignment | None = None) -> None:
        """Others who wait for the item must look for another way. The claim is this worker's, or `owner`'s."""
        try:
            await self._index.give_up(identity, owner or self._me, failure)
        except BrokerUnavailable as error:
            log.warning("item %s stays claimed until the claim runs out: %s", identity, error)


def gone(ref: MediaRef) -> MediaExpired:
    """Neither its bytes nor its embedding are to be had."""
    return MediaExpired("a medium was gone before a worker read it; send the request again", param=ref.param)


def reason(error: BaseException | None) -> Failure | None:
    """What those are told who wait for an item that was not encoded because of the error.

    None, which is "look again", where neither item nor worker is at fault: it was one request that ended, or whose
    bytes are gone, and others have their own.
    """
    if error is None or isinstance(error, asyncio.CancelledError | MediaExpired):
        return None
    if isinstance(error, TrivetError):
        return error.failure()
    return EncodeFailed(f"the worker that was to encode it failed ({type(error).__name__}; see its log)").failure()
