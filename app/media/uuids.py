"""Clients' own names for media, in Redis: what came with a `uuid` once can be meant by the `uuid` alone."""

from __future__ import annotations

import logging
from typing import Any

import blake3
from pydantic import Field, ValidationError

from app import keys
from app.errors.media import MediaUuidTaken
from app.messages.base import Message
from app.messages.media import Modality
from app.redis import needed
from app.tick import Tick

log = logging.getLogger(__name__)


class NamedMedium(Message):
    """The medium that a name stands for. `size` (bytes) and `media_type` are those of MediaRef."""

    modality: Modality
    identity: str = Field(pattern=r"^[0-9a-f]{32,64}$")
    size: int = Field(gt=0)
    media_type: str = ""


class MediaUuids:
    """Names by scope: whatever else makes an identity, such as the model's fingerprint and the tenant.

    `redis` is an asyncio client. A name that is not used for `ttl_s` stands for nothing. With `rebinds` the last medium
    that came with a name is the one that it stands for; without, the first.
    """

    def __init__(self, redis: Any, ttl_s: int, *, rebinds: bool) -> None:
        self._tick = Tick(redis)
        self._ttl_s = ttl_s
        self._rebinds = rebinds

    async def bind(self, scope: str, uuid: str, medium: NamedMedium, param: str) -> None:
        """Let the name stand for the medium. Raises MediaUuidTaken, or BrokerUnavailable."""
        condition = () if self._rebinds else ("NX",)
        key, text = _key(scope, uuid), medium.model_dump_json()
        if await self._run("SET", key, text, *condition, "EX", self._ttl_s):
            return
        known = await self.find(scope, uuid)
        if known != medium:
            raise MediaUuidTaken("this uuid stands for another medium (media.rebind_uuids is off)", param=param)

    async def find(self, scope: str, uuid: str) -> NamedMedium | None:
        """What the name stands for, for the whole time again. Raises BrokerUnavailable."""
        found = await self._run("GETEX", _key(scope, uuid), "EX", self._ttl_s)
        return None if found is None else _medium(found)

    async def _run(self, *command: Any) -> Any:
        with needed("uuids need", str(command[0])):
            return await self._tick.run(*command)


def _medium(text: bytes) -> NamedMedium | None:
    try:
        return NamedMedium.model_validate_json(text)
    except ValidationError as error:
        log.error("unreadable medium of a uuid (another version of Trivet?): %d errors", error.error_count())
        return None


def _key(scope: str, uuid: str) -> str:
    """The scope has a tenant's name, which is nobody's business."""
    return keys.uuid(blake3.blake3(scope.encode()).hexdigest(length=16), uuid)
