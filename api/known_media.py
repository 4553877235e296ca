"""Media that need no bytes from anybody: they are in shared memory somewhere, or a worker has their embedding."""

from __future__ import annotations

from typing import NamedTuple

from app.errors.serving import BrokerUnavailable
from app.fleet import FleetView
from app.items.index import ItemIndex
from app.media import MediaHolder
from app.media.places import MediaPlaces
from app.media.uuids import NamedMedium
from app.messages.plans import Assignment
from app.messages.tensors import Descriptor


class Known(NamedTuple):
    """Where the bytes lie, None if only a worker has the embedding; and whether it is this process that has them."""

    source: Descriptor | None
    here: bool


class KnownMedia:
    """Finds them: in this process's memory, in another API process's, in the index of embeddings.

    What is here is held for the request, for at most `lease_s`, and can be relied on; what is elsewhere may be gone
    when a worker comes for it.
    """

    def __init__(
        self, holder: MediaHolder, places: MediaPlaces, items: ItemIndex, fleet: FleetView, lease_s: float
    ) -> None:
        self._holder = holder
        self._places = places
        self._items = items
        self._fleet = fleet
        self._lease_s = lease_s

    async def find(self, medium: NamedMedium, item: str, held: list[str], *, strict: bool = False) -> Known | None:
        """None when nobody has the medium. `item` names its embedding.

        If it is here its identity gets into `held`. With `strict`, for a medium that cannot be got otherwise, a Redis
        that does not answer is BrokerUnavailable, and else nobody's medium. Raises MediaMemoryFull, TensorError.
        """
        source = await self._holder.take(medium.identity, self._lease_s)
        if source is not None:
            held.append(medium.identity)
            return Known(source, here=True)
        source = await self._places.find(medium.identity, strict=strict)
        if source is None and not await self._is_encoded(item, strict):
            return None
        return Known(source, here=False)

    async def _is_encoded(self, item: str, strict: bool) -> bool:
        try:
            found = (await self._items.find([item]))[item]
        except BrokerUnavailable:
            if strict:
                raise
            return False  # it is got once more than necessary
        owners = (Assignment(worker=name, incarnation=holder.incarnation) for name, holder in found.holders.items())
        return found.record is not None and any([await self._fleet.knows(owner) for owner in owners])
