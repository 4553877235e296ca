"""All that an API process needs to take media, started and stopped with it."""

from __future__ import annotations

from typing import Any

from api import metrics
from api.known_media import KnownMedia
from api.media_memory import MediaMemory
from api.media_sources import MediaSources, lease_s
from app.fleet import FleetView
from app.items.index import ItemIndex
from app.media.fetch import MediaFetcher
from app.media.places import MediaPlaces
from app.media.url_memo import UrlMemo
from app.media.uuids import MediaUuids
from app.settings import Settings


class MediaDesk:
    """`sources` gets media from `start` on. `api` names this process, `redis` is an asyncio client."""

    def __init__(self, settings: Settings, api: str, redis: Any, items: ItemIndex, fleet: FleetView) -> None:
        places = MediaPlaces(redis, items.namespace, api)
        self._places = places
        self._memory = MediaMemory(settings, places)
        self._memo = UrlMemo(redis, settings.media_urls.memo_ttl_s)
        self._fetcher = MediaFetcher(settings.media_urls, int(settings.media.max_item_mb * 1e6))
        self.sources = MediaSources(
            settings,
            items.namespace,
            self._memory.holder,
            self._fetcher,
            KnownMedia(self._memory.holder, places, items, fleet, lease_s(settings)),
            self._memo,
            MediaUuids(redis, settings.media.uuid_ttl_s, rebinds=settings.media.rebind_uuids),
        )

    async def start(self) -> None:
        await self._memory.start()

    async def keep_offered(self) -> None:
        """For ever: see `MediaHolder.keep_offered`."""
        await self._memory.holder.keep_offered()

    def measure(self) -> None:
        """Bring what is counted into the metrics."""
        for outcome, count in self._fetcher.counts.items():
            metrics.MEDIA_URLS.labels(outcome).set(count)
        metrics.MEDIA_MEMORY_LOST.labels("url").set(self._memo.lost)
        metrics.MEDIA_MEMORY_LOST.labels("place").set(self._places.lost)

    async def close(self) -> None:
        """Whatever fails, no file is left."""
        try:
            await self._fetcher.close()
        finally:
            await self._memory.close()

    def remove(self) -> None:
        """Delete the shared memory, for a process that ends at once."""
        self._memory.remove()
