"""Responses in Redis: one hash for each, with all that the model was told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from app import keys
from app.redis import needed
from app.scripts import Script
from app.settings_sections import ApiSettings
from app.tick import Tick

FOLDER = Path(__file__).parent
WHOSE = "stored responses need"
KEEP, SETTLE = Script(FOLDER / "keep.lua"), Script(FOLDER / "settle.lua")

#: What a response is until it has ended.
RUNNING = frozenset({"queued", "in_progress"})
#: With which ones a conversation can go on.
CONTINUABLE = frozenset({"completed", "incomplete"})
#: Longer ids are none of ours, whatever they say.
MAX_ID = 200
LOST = "the API process that ran the response has ended"

Response = dict[str, Any]


class Stored(NamedTuple):
    """A response, as clients get it, and the items that it was made from, those of the conversation before included.

    Media in `input` are URLs, or names (`uuid`) of media that the cluster may still hold.
    """

    response: Response
    input: list[Any]

    @property
    def status(self) -> str:
        return str(self.response["status"])


class ResponseStore:
    """Keeps responses for `api.response_store_ttl_s` after their end, each for its own tenant alone.

    `redis` is an asyncio client, `api` names this process: what it ran ended with it. Methods raise BrokerUnavailable.
    """

    def __init__(self, redis: Any, api: str, settings: ApiSettings) -> None:
        self.max_bytes = settings.response_store_max_kb * 1000
        self._tick = Tick(redis)
        self._api = api
        self._ttl_s = settings.response_store_ttl_s
        self._longest_s = math.ceil(settings.request_timeout_s) + self._ttl_s

    async def keep(self, tenant: str, response: Response, given: bytes) -> bool:
        """Write a response, whether it has ended or not; False if that is more than `max_bytes`.

        `given` is its input, a JSON array.
        """
        text = orjson.dumps(response)
        if len(text) + len(given) > self.max_bytes:
            return False
        key, status = keys.response(tenant, response["id"]), response["status"]
        with needed(WHOSE, "keep"):
            await KEEP.run(self._tick, [key], status, text, given, self._api, self._life_s(status))
        return True

    async def settle(self, tenant: str, response: Response, given_bytes: int = 0) -> str | None:
        """Write how a response that was kept goes on or ended: the status written; None if it had ended, or is gone.

        One larger than `max_bytes`, with the `given_bytes` of its input, becomes a failed one without output.
        """
        text = orjson.dumps(response)
        if len(text) + given_bytes > self.max_bytes:
            response = failed(response, f"the response is larger than {self.max_bytes // 1000} KB, which are stored")
            text = orjson.dumps(response)
        key, status = keys.response(tenant, response["id"]), str(response["status"])
        with needed(WHOSE, "settle"):
            return status if await SETTLE.run(self._tick, [key], status, text, self._life_s(status)) else None

    async def find(self, tenant: str, response_id: str) -> Stored | None:
        """One whose API process is gone is a failed one."""
        if len(response_id) > MAX_ID:
            return None
        with needed(WHOSE, "HMGET"):
            found = await self._tick.run("HMGET", keys.response(tenant, response_id), "response", "input", "api")
            text, given, api = found
            if text is None or given is None:
                return None
            stored = Stored(orjson.loads(text), orjson.loads(given))
            if stored.status in RUNNING and not await self._tick.run("EXISTS", keys.api((api or b"").decode())):
                return stored._replace(response=failed(stored.response, LOST))
            return stored

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        if len(response_id) > MAX_ID:
            return False
        with needed(WHOSE, "DEL"):
            return bool(await self._tick.run("DEL", keys.response(tenant, response_id)))

    def _life_s(self, status: str) -> int:
        return self._longest_s if status in RUNNING else self._ttl_s


def failed(response: Response, why: str) -> Response:
    """The response as one that did not come to its end."""
    return {**response, "status": "failed", "output": [], "error": {"code": "server_error", "message": why}}
