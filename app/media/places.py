"""Where the bytes of media lie, in Redis: one API process can refer to what another one holds."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

from pydantic import ValidationError
from redis.exceptions import RedisError

from app import keys
from app.errors.serving import BrokerUnavailable
from app.messages.tensors import Descriptor
from app.tick import Tick

log = logging.getLogger(__name__)

#: A buffer that may be read for a shorter time is as good as gone.
LEAST_S = 30.0


class MediaPlaces:
    """The media of one model (`namespace` is its fingerprint), and what the API process `me` says of its own.

    `redis` is an asyncio client. Nothing is wrong with a request that finds nothing here, as long as it can get the
    medium, so a Redis that does not answer is a place that nobody knows: `lost` counts these, and the log says so.
    """

    def __init__(self, redis: Any, namespace: str, me: str) -> None:
        self.lost = 0
        self._tick = Tick(redis)
        self._namespace = namespace
        self._me = me
        self._saying: set[asyncio.Task[None]] = set()

    def add(self, identity: str, source: Descriptor) -> None:
        """Say that this process holds the medium, for as long as the descriptor is good."""
        key = keys.media(self._namespace, identity)
        life = max(1, int(source.expires_at - time.time()))
        # Other processes have fields of the same hash: its life is that of the longest.
        field = ("HSET", key, self._me, source.model_dump_json())
        self._say(field, ("EXPIRE", key, life, "NX"), ("EXPIRE", key, life, "GT"))

    def remove(self, identity: str) -> None:
        """Say that this process does not hold it any more."""
        self._say(("HDEL", keys.media(self._namespace, identity), self._me))

    async def find(self, identity: str, *, strict: bool = False) -> Descriptor | None:
        """Where a live process other than this one holds the medium. What dead ones held is removed in passing.

        With `strict` a Redis that does not answer is BrokerUnavailable.
        """
        try:
            return await self._find(keys.media(self._namespace, identity))
        except (RedisError, OSError) as error:
            self._lose(error)
            if strict:
                raise BrokerUnavailable(f"Redis did not tell where a medium is ({type(error).__name__})") from error
            return None

    async def _find(self, key: str) -> Descriptor | None:
        answer = await self._tick.run("HGETALL", key)
        pairs = answer.items() if isinstance(answer, dict) else zip(answer[::2], answer[1::2], strict=True)
        found = {api.decode(errors="replace"): text for api, text in pairs}
        found.pop(self._me, None)
        for api in random.sample(list(found), len(found)):
            if not await self._tick.run("EXISTS", keys.api(api)):
                await self._tick.run("HDEL", key, api)
            elif (source := _descriptor(found[api])) is not None and source.expires_at > time.time() + LEAST_S:
                return source
        return None

    def _say(self, *commands: tuple[Any, ...]) -> None:
        # Tasks begin in the order in which they were made, and commands are sent in that of their beginning.
        task = asyncio.create_task(self._send(commands))
        self._saying.add(task)
        task.add_done_callback(self._saying.discard)

    async def _send(self, commands: tuple[tuple[Any, ...], ...]) -> None:
        try:
            await asyncio.gather(*(self._tick.run(*command) for command in commands))
        except (RedisError, OSError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self.lost += 1
        log.warning("where media lie is not said, or not known: %s", type(error).__name__)


def _descriptor(text: bytes) -> Descriptor | None:
    try:
        return Descriptor.model_validate_json(text)
    except ValidationError:
        return None  # of another version
