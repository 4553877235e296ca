"""In which order a prompt may take on the encoding of its items."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Turns:
    """Every prompt goes by the items' names, and takes one on only once it has, or has taken on, those before it.

    Otherwise two prompts could each be encoding what the other one waits for, until both their times are up.
    """

    def __init__(self, identities: Iterable[str]) -> None:
        self._settled = {identity: asyncio.Event() for identity in sorted(identities)}

    async def wait(self, identity: str) -> None:
        """Return once all items before this one are settled."""
        for other, settled in self._settled.items():
            if other == identity:
                return
            await settled.wait()

    def settle(self, identity: str) -> None:
        """The item is here, or was taken on, or the search for it is over."""
        self._settled[identity].set()
