"""What vLLM's serving code gets in the place of an engine's generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Iterated(Generic[T]):
    """An async generator that can be closed while another task waits for its next value.

    Of several prompts vLLM waits for each in a task of its own, and does not wait for their ends.
    """

    def __init__(self) -> None:
        self._open: list[AsyncGenerator[Any, None]] = []
        self._steps: AsyncGenerator[T, None] | None = None
        self._waiting: asyncio.Task[Any] | None = None

    def _outputs(self) -> AsyncGenerator[T, None]:
        """The values. It is begun when the first one is asked for."""
        raise NotImplementedError

    def __aiter__(self) -> Iterated[T]:
        return self

    async def __anext__(self) -> T:
        if self._steps is None:
            self._steps = self._outputs()
            self._open.append(self._steps)
        self._waiting = asyncio.current_task()
        try:
            return await anext(self._steps)
        finally:
            self._waiting = None

    async def aclose(self) -> None:
        """Stop the request, if it has not ended."""
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        for one in reversed(self._open):
            await one.aclose()
