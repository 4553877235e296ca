"""Server-side scripts: each is one step that no other client can come between."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError

from app.tick import Tick


class Script:
    """The text of one or several files, in this order, and the name that Redis gives it."""

    def __init__(self, *parts: Path) -> None:
        self.name = parts[-1].stem
        self.text = "".join(part.read_text() for part in parts)
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()

    async def run(self, tick: Tick, keys: Sequence[str], *arguments: str | bytes | int | float) -> Any:
        """Its answer. By its name, and whole for a Redis that does not know it yet. Raises RedisError or OSError."""
        call = (len(keys), *keys, *arguments)
        try:
            return await tick.run("EVALSHA", self.sha, *call)
        except NoScriptError:  # a Redis that is new, or was restarted
            return await tick.run("EVAL", self.text, *call)
