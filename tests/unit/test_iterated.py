"""api.iterated: a generator that somebody else closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from api.iterated import Iterated


class Counting(Iterated[int]):
    """0 and 1, and then nothing more, for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    async def _outputs(self) -> AsyncGenerator[int, None]:
        try:
            yield 0
            yield 1
            await asyncio.Event().wait()
        finally:
            self.ended = True


async def test_values_come_as_from_any_generator() -> None:
    counting = Counting()
    assert [await anext(counting), await anext(counting)] == [0, 1]
    await counting.aclose()
    assert counting.ended


async def test_it_is_closed_while_another_task_waits() -> None:
    counting = Counting()
    await anext(counting)
    await anext(counting)
    waiting = asyncio.ensure_future(counting.__anext__())
    await asyncio.sleep(0)
    await asyncio.wait_for(counting.aclose(), 5)
    assert counting.ended and waiting.cancelled()


async def test_one_that_was_never_asked_has_nothing_to_close() -> None:
    counting = Counting()
    await counting.aclose()
    assert not counting.ended
    with pytest.raises(NotImplementedError):
        await anext(Iterated[int]())
