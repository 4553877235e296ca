"""All that an API process needs to take media, started and stopped with it."""

from __future__ import annotations

from api.media_memory import MediaMemory
from api.media_sources import MediaSources
from app.media.fetch import MediaFetcher
from app.settings import Settings


class MediaDesk:
    """`sources` gets media from `start` on."""

    def __init__(self, settings: Settings, fingerprint: str) -> None:
        self._memory = MediaMemory(settings)
        self._fetcher = MediaFetcher(settings.media_urls, int(settings.media.max_item_mb * 1e6))
        self.sources = MediaSources(settings, fingerprint, self._memory.holder, self._fetcher)

    async def start(self) -> None:
        await self._memory.start()

    async def close(self) -> None:
        """Whatever fails, no file is left."""
        try:
            await self._fetcher.close()
        finally:
            await self._memory.close()

    def remove(self) -> None:
        """Delete the shared memory, for a process that ends at once."""
        self._memory.remove()
