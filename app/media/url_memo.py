"""What URLs gave when they were last fetched, in Redis: a known one is asked whether it changed, and not downloaded."""

from __future__ import annotations

import logging
from typing import Any

import blake3
from pydantic import Field, ValidationError
from redis.exceptions import RedisError

from app import keys
from app.messages.base import Message
from app.tick import Tick

log = logging.getLogger(__name__)


class UrlMemory(Message):
    """The medium that a URL gave: its identity and size in bytes, and what to ask the host with whether it changed."""

    identity: str = Field(pattern=r"^[0-9a-f]{32,64}$")
    size: int = Field(ge=1)
    media_type: str = ""
    etag: str | None = None
    last_modified: str | None = None


class UrlMemo:
    """Memories by URL and `salt`: whatever else makes an identity, such as the model's fingerprint and the tenant.

    `redis` is an asyncio client. The memo saves downloads and nothing depends on it, so a Redis that does not answer
    is a URL that nobody knows: `lost` counts these, and the log says so.
    """

    def __init__(self, redis: Any, ttl_s: int) -> None:
        self.lost = 0
        self._tick = Tick(redis)
        self._ttl_s = ttl_s

    async def get(self, url: str, salt: str) -> UrlMemory | None:
        """What the URL gave, if that is known; it is then remembered for the whole time again."""
        try:
            found = await self._tick.run("GETEX", _key(url, salt), "EX", self._ttl_s)
            return None if found is None else UrlMemory.model_validate_json(found)
        except (RedisError, OSError, ValidationError) as error:
            self._lose(error)
            return None

    async def put(self, url: str, salt: str, memory: UrlMemory) -> None:
        try:
            await self._tick.run("SET", _key(url, salt), memory.model_dump_json(exclude_none=True), "EX", self._ttl_s)
        except (RedisError, OSError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self.lost += 1
        log.warning("a media URL's memory is lost: %s", type(error).__name__)


def _key(url: str, salt: str) -> str:
    """A digest: URLs can be long, and signed ones are secrets."""
    text = url.encode(errors="surrogatepass")
    hasher = blake3.blake3(len(text).to_bytes(4, "big"))
    hasher.update(text)
    hasher.update(salt.encode())
    return keys.url(hasher.hexdigest(length=16))
