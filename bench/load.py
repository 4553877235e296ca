"""Closed-loop load: `concurrency` requests in flight, each followed by the next, until all have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median

#: Runs request number n; calls its argument at the first token.
Request = Callable[[int, Callable[[], None]], Awaitable[None]]


@dataclass
class Result:
    """Times in seconds."""

    wall: float = 0.0
    tokens: int = 0
    first_token: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall

    @property
    def first_token_p50(self) -> float:
        return median(self.first_token)

    @property
    def first_token_p99(self) -> float:
        return sorted(self.first_token)[max(0, int(len(self.first_token) * 0.99) - 1)]


async def run(request: Request, *, requests: int, concurrency: int, tokens_each: int) -> Result:
    result, numbers = Result(), iter(range(requests))

    async def one_after_another() -> None:
        for number in numbers:
            started = time.perf_counter()
            await request(number, lambda at=started: result.first_token.append(time.perf_counter() - at))  # type: ignore[misc]
            result.tokens += tokens_each

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, requests)):
            group.create_task(one_after_another())
    result.wall = time.perf_counter() - started
    return result
