"""One Redis round trip for all that a program wants of Redis during one tick of its event loop."""

from __future__ import annotations

import asyncio
from typing import Any

Command = tuple[Any, ...]


class Tick:
    """Runs commands over one asyncio client; those of the same loop tick share a pipeline.

    A client command of redis-py costs 0.3 ms of CPU, mostly apart from the command itself: when 64 requests arrive or
    end together, this is what they wait for.
    """

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._pending: list[tuple[Command, asyncio.Future[Any]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def run(self, *command: Any) -> Any:
        """`await tick.run("LPUSH", key, value)`: the command's answer. Raises RedisError or OSError."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.append((command, answer))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        return await answer

    async def _flush(self) -> None:
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                await self._execute(batch)
        finally:
            self._flushing = None

    async def _execute(self, batch: list[tuple[Command, asyncio.Future[Any]]]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for command, _ in batch:
            pipe.execute_command(*command)
        try:
            found: list[Any] = await pipe.execute(raise_on_error=False)
        except Exception as error:  # whatever it is, its callers wait for it
            found = [error] * len(batch)
        for (_, answer), value in zip(batch, found, strict=True):
            if answer.done():
                continue
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)
