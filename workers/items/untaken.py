"""Whether what was encoded for others has been read by them, so that it may make room."""

from __future__ import annotations

import asyncio
import logging

from app.errors.serving import BrokerUnavailable
from app.items.index import ItemIndex
from workers.embeddings.room import Room

log = logging.getLogger(__name__)

#: Seconds between two looks into the index, while somebody waits for room.
LOOK_S = 0.05


async def watch(room: Room, index: ItemIndex, me: str) -> None:
    """For ever: while somebody waits for room, look which items others than the worker `me` hold by now."""
    while True:
        await room.short.wait()
        try:
            found = await index.find(room.untaken())
            room.taken([identity for identity, known in found.items() if known.holders.keys() - {me}])
        except BrokerUnavailable as error:
            log.warning("what others have of this worker's items is not known: %s", error)
            room.taken([])
        await asyncio.sleep(LOOK_S)
