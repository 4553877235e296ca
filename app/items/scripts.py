"""The server-side scripts of this folder: each is one step that no other client can come between."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError, RedisError, ResponseError

from app.errors import BrokerUnavailable
from app.tick import Tick

log = logging.getLogger(__name__)


class Script:
    """One file's text, after what all of them use, and the name that Redis gives it."""

    def __init__(self, name: str) -> None:
        folder = Path(__file__).parent
        self.name = name
        self.text = (folder / "read.lua").read_text() + (folder / f"{name}.lua").read_text()
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()


FIND, CLAIM, PUBLISH = Script("find"), Script("claim"), Script("publish")
HOLD, WITHDRAW, GIVE_UP = Script("hold"), Script("withdraw"), Script("give_up")


class Scripts:
    """Runs scripts over one asyncio client; those of the same loop tick share a round trip."""

    def __init__(self, redis: Any) -> None:
        self._tick = Tick(redis)

    async def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """The script's answer. Raises BrokerUnavailable."""
        call = (len(keys), *keys, *arguments)
        with _edge(script.name):
            try:
                return await self._tick.run("EVALSHA", script.sha, *call)
            except NoScriptError:  # a Redis that is new, or was restarted
                return await self._tick.run("EVAL", script.text, *call)

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
