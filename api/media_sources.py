"""Where the medium of a part comes from, and how it becomes a reference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from api.known_media import KnownMedia
from api.media_parts import Medium
from app import media
from app.errors.media import MediaUuidNotFound
from app.media import MediaHolder
from app.media.fetch import Fetched
from app.media.url_memo import UrlMemo, UrlMemory
from app.media.uuids import MediaUuids, NamedMedium
from app.messages.media import MediaRef, Modality
from app.messages.tensors import Descriptor
from app.settings import Settings

#: Gets bytes, and the media type that MediaRef has; it may block.
_Read = Callable[[], tuple[bytes, str]]

#: How much longer than the longest request its media are kept, should nobody release them.
LEASE_MARGIN_S = 30.0
#: Media of a process that are decoded, checked and written at once: each is in its memory meanwhile, and takes a core.
AT_ONCE = 4
#: Types that are taken from media hosts. Ogg may be declared as either.
ACCEPT: dict[Modality, str] = {"image": "image/*", "video": "video/*", "audio": "audio/*, video/ogg"}


class Fetcher(Protocol):
    """What is needed of the media fetcher."""

    def check(self, url: str, param: str) -> None: ...

    def fetch(
        self, url: str, param: str, *, accept: str = "*/*", etag: str | None = None, last_modified: str | None = None
    ) -> AbstractAsyncContextManager[Fetched]: ...


class Taken(NamedTuple):
    """A medium for a request. One that is `borrowed` may be gone when a worker comes for it."""

    ref: MediaRef
    borrowed: bool


class Naming(NamedTuple):
    """What of a request makes names of its own for its media: `salt` for their bytes, and what the model's processor
    is told, for what becomes of them."""

    salt: str = ""
    processor_kwargs: dict[str, Any] | None = None


class MediaSources:
    """Gets media and puts their bytes where workers can read them.

    `fingerprint` names the model and its processor's settings (`app.media.fingerprint`).
    """

    def __init__(
        self,
        settings: Settings,
        fingerprint: str,
        holder: MediaHolder,
        fetcher: Fetcher,
        known: KnownMedia,
        memo: UrlMemo,
        uuids: MediaUuids,
    ) -> None:
        self.holder = holder
        self._limits = settings.media
        self._by_text = settings.media_urls.identity == "url"
        self._lease_s = lease_s(settings)
        self._fingerprint = fingerprint
        self._fetcher = fetcher
        self._known = known
        self._memo = memo
        self._uuids = uuids
        self._turns = asyncio.Semaphore(AT_ONCE)

    def check(self, medium: Medium) -> None:
        """Raise MediaRefused for what `take` would refuse without asking anybody."""
        if medium.url is not None and not media.is_data(medium.url):
            self._fetcher.check(medium.url, medium.param)

    async def take(self, medium: Medium, naming: Naming, held: list[str], *, anew: bool = False) -> Taken:
        """The medium's reference. Whatever is held for it gets into `held`, and has to be released.

        With `anew` nothing is borrowed. Raises MediaRefused, which names the part, MediaMemoryFull, and what the
        fetcher raises; for a medium with a uuid BrokerUnavailable, too.
        """
        scope = json.dumps([self._fingerprint, naming.salt])
        if medium.url is None:
            return await self._named(medium, scope, naming, held, anew)
        if media.is_data(medium.url):
            named, taken = await self._decoded(medium, medium.url, naming, held)
        else:
            named, taken = await self._fetched(medium, medium.url, naming, held, anew)
        if medium.uuid is not None:
            await self._uuids.bind(scope, medium.uuid, named, medium.param)
        return taken

    async def _named(self, medium: Medium, scope: str, naming: Naming, held: list[str], anew: bool) -> Taken:
        assert medium.uuid is not None
        named = await self._uuids.find(scope, medium.uuid)
        if named is not None and named.modality == medium.modality:
            taken = await self._found(named, medium, naming, held)
            if taken is not None and not (anew and taken.borrowed):
                return taken
        raise MediaUuidNotFound(
            f"no {medium.modality} is known by this uuid, or it is gone: send it again, with its uuid",
            param=medium.param,
        )

    async def _decoded(self, medium: Medium, url: str, naming: Naming, held: list[str]) -> tuple[NamedMedium, Taken]:
        return await self._keep(lambda: self._decode(url, medium), medium, naming, held)

    async def _fetched(
        self, medium: Medium, url: str, naming: Naming, held: list[str], anew: bool
    ) -> tuple[NamedMedium, Taken]:
        scope = json.dumps([self._fingerprint, medium.modality, naming.salt])
        memory = None if anew else await self._memo.get(url, scope)
        found = None if memory is None else await self._remembered(memory, medium, naming, held)
        validators: dict[str, str | None] = {}
        if memory is not None and found is not None:
            if self._by_text:
                return found
            validators = {"etag": memory.etag, "last_modified": memory.last_modified}
        accept = ACCEPT[medium.modality]
        async with self._fetcher.fetch(url, medium.param, accept=accept, **validators) as fetched:
            if fetched.not_modified:
                assert found is not None
                return found
            named, taken = await self._keep(lambda: (fetched.data, ""), medium, naming, held)
        await self._memo.put(
            url,
            scope,
            UrlMemory(identity=named.identity, size=named.size, etag=fetched.etag, last_modified=fetched.last_modified),
        )
        return named, taken

    async def _remembered(
        self, memory: UrlMemory, medium: Medium, naming: Naming, held: list[str]
    ) -> tuple[NamedMedium, Taken] | None:
        """What the URL gave last, if it may still be used, and somebody has it."""
        if not (self._by_text or memory.etag or memory.last_modified):
            return None
        named = NamedMedium(modality=medium.modality, identity=memory.identity, size=memory.size)
        taken = await self._found(named, medium, naming, held)
        return None if taken is None else (named, taken)

    async def _found(self, named: NamedMedium, medium: Medium, naming: Naming, held: list[str]) -> Taken | None:
        item = media.processed(named.identity, naming.processor_kwargs)
        known = await self._known.find(named, item, held, strict=medium.url is None)
        return None if known is None else Taken(_reference(named, medium, naming, known.source), not known.here)

    async def _keep(self, read: _Read, medium: Medium, naming: Naming, held: list[str]) -> tuple[NamedMedium, Taken]:
        """Keep what `read` gives, in one of the turns."""
        await self._turns.acquire()
        reading = asyncio.ensure_future(asyncio.to_thread(self._identified, read, medium, naming.salt))
        try:
            data, media_type, identity = await asyncio.shield(reading)
            source = await self.holder.put(identity, data, self._lease_s)
        finally:
            # A thread goes on when its request is cancelled, with the medium in memory: the turn lasts as long.
            reading.add_done_callback(lambda _: self._turns.release())
        held.append(identity)
        named = NamedMedium(modality=medium.modality, identity=identity, size=len(data), media_type=media_type)
        return named, Taken(_reference(named, medium, naming, source), borrowed=False)

    def _decode(self, url: str, medium: Medium) -> tuple[bytes, str]:
        limits = self._limits
        most = int(limits.max_item_mb * 1e6), limits.max_video_frames
        return media.decode(url, medium.modality, *most, medium.param, medium.payload)

    def _identified(self, read: _Read, medium: Medium, salt: str) -> tuple[bytes, str, str]:
        """Sound content, its media type, and its name. Raises MediaRefused."""
        data, media_type = read()
        media.check(data, medium.modality, media_type, self._limits, medium.param)
        name = media.identify(data, modality=medium.modality, model=self._fingerprint, media_type=media_type, salt=salt)
        return data, media_type, name


def lease_s(settings: Settings) -> float:
    """How long a request's media are held for it at most."""
    return settings.api.request_timeout_s + LEASE_MARGIN_S


def _reference(named: NamedMedium, medium: Medium, naming: Naming, source: Descriptor | None) -> MediaRef:
    return MediaRef(
        modality=named.modality,
        identity=media.processed(named.identity, naming.processor_kwargs),
        size=named.size,
        media_type=named.media_type,
        param=medium.param,
        source=source,
        processor_kwargs=naming.processor_kwargs,
    )
