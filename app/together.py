"""Several things at once, of which one that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first failure ends what still runs."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
