"""Closed-loop load: `concurrency` requests in flight, each followed by the next, until all have ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median

#: Runs request number n for so many tokens; calls its last argument at the first one.
Request = Callable[[int, int, Callable[[], None]], Awaitable[None]]


@dataclass(frozen=True)
class Shape:
    """`tokens` is the mean length of an answer, and lengths differ evenly by up to `spread` (0 to 1) of it.

    With equal lengths all requests of a closed loop end and begin together, wave after wave.
    """

    requests: int
    concurrency: int
    tokens: int
    spread: float

    def lengths(self) -> list[int]:
        """The same for all who ask."""
        rng = random.Random(11)
        return [round(self.tokens * rng.uniform(1 - self.spread, 1 + self.spread)) for _ in range(self.requests)]


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


async def run(request: Request, shape: Shape) -> Result:
    result, lengths = Result(), shape.lengths()
    numbers = iter(range(shape.requests))

    async def one_after_another() -> None:
        for number in numbers:
            started = time.perf_counter()

            def first_token(at: float = started) -> None:
                result.first_token.append(time.perf_counter() - at)

            await request(number, lengths[number], first_token)
            result.tokens += lengths[number]

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(shape.concurrency, shape.requests)):
            group.create_task(one_after_another())
    result.wall = time.perf_counter() - started
    return result
