"""Where the medium of a part comes from, and how it becomes a reference."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from api.media_parts import Medium
from app import media
from app.media import MediaHolder
from app.messages import MediaRef, Modality
from app.settings import Settings

if TYPE_CHECKING:
    from app.media.fetch import Fetched

#: How much longer than the longest request its media are kept, should nobody release them.
LEASE_MARGIN_S = 30.0
#: Media of a process that are decoded, checked and written at once: each is in its memory meanwhile, and takes a core.
AT_ONCE = 4
#: Types that are taken from media hosts. Ogg may be declared as either.
ACCEPT: dict[Modality, str] = {"image": "image/*", "video": "video/*", "audio": "audio/*, video/ogg"}


class Fetcher(Protocol):
    """What is needed of the media fetcher."""

    def check(self, url: str, param: str) -> None: ...

    async def fetch(
        self, url: str, param: str, *, accept: str = "*/*", etag: str | None = None, last_modified: str | None = None
    ) -> Fetched: ...


class MediaSources:
    """Gets media and puts their bytes where workers can read them.

    `fingerprint` names the model and its processor's settings (`app.media.fingerprint`).
    """

    def __init__(self, settings: Settings, fingerprint: str, holder: MediaHolder, fetcher: Fetcher) -> None:
        self.holder = holder
        self._limits = settings.media
        self._lease_s = settings.api.request_timeout_s + LEASE_MARGIN_S
        self._fingerprint = fingerprint
        self._fetcher = fetcher
        self._turns = asyncio.Semaphore(AT_ONCE)

    def check(self, medium: Medium) -> None:
        """Raise MediaRefused for what `take` would refuse without asking anybody."""
        if medium.url is not None and not media.is_data(medium.url):
            self._fetcher.check(medium.url, medium.param)

    async def take(self, medium: Medium, salt: str, held: list[str]) -> MediaRef:
        """The medium's reference. Whatever is held for it gets into `held`, and has to be released.

        Raises MediaRefused, which names the part, MediaMemoryFull, and what the fetcher raises.
        """
        url = medium.url
        assert url is not None
        if media.is_data(url):
            async with self._turns:
                data, media_type = await asyncio.to_thread(self._decode, url, medium)
                return await self._keep(medium, data, media_type, salt, held)
        fetched = await self._fetcher.fetch(url, medium.param, accept=ACCEPT[medium.modality])
        async with self._turns:
            return await self._keep(medium, fetched.data, "", salt, held)

    async def _keep(self, medium: Medium, data: bytes, media_type: str, salt: str, held: list[str]) -> MediaRef:
        modality, param = medium.modality, medium.param
        identity = await asyncio.to_thread(self._identify, data, modality, media_type, param, salt)
        source = await self.holder.put(identity, data, self._lease_s)
        held.append(identity)
        return MediaRef(
            modality=modality, identity=identity, size=len(data), media_type=media_type, param=param, source=source
        )

    def _decode(self, url: str, medium: Medium) -> tuple[bytes, str]:
        return media.decode(url, medium.modality, int(self._limits.max_item_mb * 1e6), medium.param)

    def _identify(self, data: bytes, modality: Modality, media_type: str, param: str, salt: str) -> str:
        """The name of sound content. Raises MediaRefused."""
        media.check(data, modality, media_type, self._limits, param)
        return media.identify(data, modality=modality, model=self._fingerprint, media_type=media_type, salt=salt)
