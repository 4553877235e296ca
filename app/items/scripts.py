"""The scripts of this folder, and what becomes of their failures."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError, ResponseError

from app.errors import BrokerUnavailable
from app.scripts import Script
from app.tick import Tick

log = logging.getLogger(__name__)


FOLDER = Path(__file__).parent


def _script(name: str) -> Script:
    return Script(FOLDER / "read.lua", FOLDER / f"{name}.lua")


FIND, CLAIM, PUBLISH = _script("find"), _script("claim"), _script("publish")
HOLD, WITHDRAW, GIVE_UP = _script("hold"), _script("withdraw"), _script("give_up")


class Scripts:
    """Runs scripts over one asyncio client; those of the same loop tick share a round trip."""

    def __init__(self, redis: Any) -> None:
        self._tick = Tick(redis)

    async def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """The script's answer. Raises BrokerUnavailable."""
        with _edge(script.name):
            return await script.run(self._tick, keys, *arguments)

    async def get(self, key: str) -> bytes | None:
        """A string. Raises BrokerUnavailable."""
        with _edge("GET"):
            value: bytes | None = await self._tick.run("GET", key)
            return value


@contextmanager
def _edge(asked: str) -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        if isinstance(error, ResponseError):
            log.error("Redis refused what the item index asked of it (%s): %s", asked, error)
        raise BrokerUnavailable(f"the item index needs Redis, which did not answer ({type(error).__name__})") from error
