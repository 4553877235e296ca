"""The API's way to media without Redis and without a network, for tests."""

from __future__ import annotations

from typing import Any

from api.known_media import Known
from api.media_sources import MediaSources
from app.media import MediaHolder
from app.media.url_memo import UrlMemory
from app.media.uuids import NamedMedium
from app.settings import Settings
from tests.web import Web


class Here:
    """Knows what this process holds."""

    def __init__(self, holder: MediaHolder) -> None:
        self._holder = holder

    async def find(self, medium: NamedMedium, _item: str, held: list[str], *, strict: bool = False) -> Any:
        source = await self._holder.take(medium.identity, 60)
        if source is not None:
            held.append(medium.identity)
        return None if source is None else Known(source, here=True)


class Memories:
    """In place of a UrlMemo."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], UrlMemory] = {}

    async def get(self, url: str, salt: str) -> UrlMemory | None:
        return self.known.get((url, salt))

    async def put(self, url: str, salt: str, memory: UrlMemory) -> None:
        self.known[url, salt] = memory


class Names:
    """In place of MediaUuids that rebind."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], NamedMedium] = {}

    async def bind(self, scope: str, uuid: str, medium: NamedMedium, param: str) -> None:
        self.known[scope, uuid] = medium

    async def find(self, scope: str, uuid: str) -> NamedMedium | None:
        return self.known.get((scope, uuid))


def sources(settings: Settings, holder: MediaHolder, web: Web) -> MediaSources:
    """Of a model whose fingerprint is `fingerprint`."""
    parts: Any = (Here(holder), Memories(), Names())
    return MediaSources(settings, "fingerprint", holder, web, *parts)
