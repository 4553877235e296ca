"""Where media bytes wait for the worker that encodes them. Another way to move bytes is another class."""

from __future__ import annotations

from typing import Any, Protocol

from redis.exceptions import RedisError

from app import keys
from app.errors import BrokerUnavailable, MediaExpired


class MediaStore(Protocol):
    async def put(self, identity: str, data: bytes, ttl_s: float) -> None:
        """Keep `data` under its name for at least `ttl_s` seconds."""

    async def get(self, identity: str) -> bytes:
        """The bytes. Raises MediaExpired if they are gone, BrokerUnavailable if the store does not answer."""


class RedisMediaStore:
    """Bytes in the cache Redis, a key a medium, gone with the request's deadline. Works between any hosts."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    async def put(self, identity: str, data: bytes, ttl_s: float) -> None:
        try:
            await self._redis.set(keys.media(identity), data, px=max(1000, int(ttl_s * 1000)))
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the media could not be stored ({type(error).__name__})") from error

    async def get(self, identity: str) -> bytes:
        try:
            data: bytes | None = await self._redis.get(keys.media(identity))
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the media could not be read ({type(error).__name__})") from error
        if data is None:
            raise MediaExpired("the media expired before a worker read them; send the request again")
        return data
