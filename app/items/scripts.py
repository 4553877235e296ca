"""The scripts of this folder, and what becomes of their failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.redis import needed
from app.scripts import Script
from app.tick import Tick

FOLDER = Path(__file__).parent
WHOSE = "the item index needs"


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
        with needed(WHOSE, script.name):
            return await script.run(self._tick, keys, *arguments)

    async def get(self, key: str) -> bytes | None:
        """A string. Raises BrokerUnavailable."""
        with needed(WHOSE, "GET"):
            value: bytes | None = await self._tick.run("GET", key)
            return value
