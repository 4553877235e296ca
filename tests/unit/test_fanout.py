"""api.fanout."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from api.fanout import interleave


class Stream:
    """A stream whose items the test hands out; knows whether it was closed."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[int | BaseException | None] = asyncio.Queue()
        self.closed = False

    async def __call__(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            await asyncio.sleep(0)
            self.closed = True


def three() -> tuple[list[Stream], AsyncGenerator[tuple[int, int], None]]:
    streams = [Stream() for _ in range(3)]
    return streams, interleave([stream() for stream in streams])


async def test_items_come_as_they_come_with_their_streams_index() -> None:
    streams, together = three()
    for at, item in [(2, 20), (0, 0), (2, 21), (1, 10)]:
        streams[at].items.put_nowait(item)
        assert await asyncio.wait_for(anext(together), 5) == (at, item)
    await together.aclose()


async def test_each_streams_order_is_kept_and_all_items_come() -> None:
    streams, together = three()
    for stream in streams:
        for item in range(50):
            stream.items.put_nowait(item)
        stream.items.put_nowait(None)
    async with asyncio.timeout(5):
        got = [pair async for pair in together]
    for at in range(3):
        assert [item for index, item in got if index == at] == list(range(50))
    assert all(stream.closed for stream in streams)


async def test_one_that_ends_early_leaves_the_others() -> None:
    streams, together = three()
    streams[1].items.put_nowait(None)
    streams[0].items.put_nowait(1)
    assert await asyncio.wait_for(anext(together), 5) == (0, 1)
    streams[2].items.put_nowait(2)
    assert await asyncio.wait_for(anext(together), 5) == (2, 2)
    for at in (0, 2):
        streams[at].items.put_nowait(None)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(together), 5)


async def test_the_first_failure_ends_and_closes_all() -> None:
    streams, together = three()
    streams[1].items.put_nowait(1)
    assert await asyncio.wait_for(anext(together), 5) == (1, 1)
    streams[2].items.put_nowait(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(anext(together), 5)
    assert all(stream.closed for stream in streams)


async def test_failures_at_the_same_time_are_one_failure() -> None:
    streams, together = three()
    for stream in streams:
        stream.items.put_nowait(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(anext(together), 5)
    assert all(stream.closed for stream in streams)


async def test_closing_it_closes_all() -> None:
    streams, together = three()
    for stream in streams:
        stream.items.put_nowait(1)
    await asyncio.wait_for(anext(together), 5)
    await asyncio.wait_for(together.aclose(), 5)
    assert all(stream.closed for stream in streams)


async def test_cancelling_its_reader_closes_all() -> None:
    streams, together = three()
    reader = asyncio.create_task(anext(together))
    await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reader, 5)
    assert all(stream.closed for stream in streams)


async def test_no_streams_are_an_empty_stream() -> None:
    assert [pair async for pair in interleave([])] == []  # type: ignore[var-annotated]
