"""app.streaming.writer on a real Redis: what it sends, and to whom it stops sending."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from app import keys
from app.messages.deltas import Batch, Delta
from app.streaming import TokenReader, writer
from tests.integration.streams import (
    API,
    REPLAY,
    delta,
    last,
    listening,
    opened,
    put_unheard,
    reading,
    sequence,
    whole,
    writer_of,
)
from tests.messages import AGG, DECODE
from tests.polling import until


async def test_what_was_flushed_comes_before_what_others_send(redis: Any) -> None:
    first, second = writer_of(redis), writer_of(redis, DECODE)
    await first.flushed(API)
    async with reading(redis) as reader:
        for number in range(20):
            stream = opened(reader, f"r{number}", AGG, DECODE)
            first.put(API, delta(f"r{number}", 0))
            await first.flushed(API)
            second.put(API, last(f"r{number}", 1))
            assert sequence(await whole(stream)) == [0, 1]


async def test_deltas_of_a_tick_are_one_message_and_in_order(redis: Any) -> None:
    async with listening(redis) as batches:
        tokens = writer_of(redis)
        for seq in range(3):
            for request in ("a", "b"):
                tokens.put(API, delta(request, seq))
        await tokens.drain(5)
        await until(lambda: batches, "a message")
        tokens.put(API, last("a", 3))
        await tokens.drain(5)
        await until(lambda: len(batches) == 2, "another")
    assert [(batch.worker, batch.incarnation, batch.number) for batch in batches] == [
        (AGG.worker, AGG.incarnation, 1),
        (AGG.worker, AGG.incarnation, 2),
    ]
    assert [(one.request, one.seq) for one in batches[0].deltas] == [(r, s) for s in range(3) for r in "ab"]


async def test_what_is_put_during_a_round_trip_is_the_next_message(redis: Any) -> None:
    async with listening(redis) as batches:
        tokens = writer_of(redis)
        tokens.put(API, delta("a", 0))
        await asyncio.sleep(0)
        for seq in range(1, 50):
            tokens.put(API, delta("a", seq))
        await tokens.drain(5)
        await until(lambda: len(batches) == 2, "two messages")
    assert [one.seq for batch in batches for one in batch.deltas] == list(range(50))


async def test_every_api_process_has_its_own_channel_and_numbers(redis: Any) -> None:
    async with reading(redis, "one") as one, reading(redis, "two") as two:
        tokens = writer_of(redis)
        streams = [opened(one, "a"), opened(two, "b")]
        for seq in range(5):
            tokens.put("one", delta("a", seq))
            tokens.put("two", delta("b", seq))
            await tokens.drain(5)
        tokens.put("one", last("a", 5))
        tokens.put("two", last("b", 5))
        for stream in streams:
            assert sequence(await whole(stream)) == list(range(6))
        assert (one.gaps, two.gaps) == (0, 0)


async def test_the_same_batch_lies_in_the_replay_stream_which_ends(redis: Any) -> None:
    async with listening(redis) as batches:
        tokens = writer_of(redis)
        for seq in range(3):
            tokens.put(API, delta("a", seq))
            await tokens.drain(5)
        await until(lambda: len(batches) == 3, "the messages")
    entries = await redis.xrange(keys.replay(API))
    assert [msgspec.json.decode(fields[b"batch"], type=Batch) for _, fields in entries] == batches
    assert 0 < await redis.ttl(keys.replay(API)) <= keys.REPLAY_TTL_S


async def test_the_replay_stream_is_capped(redis: Any) -> None:
    async with listening(redis):
        tokens = writer_of(redis)
        for seq in range(REPLAY * 3):
            tokens.put(API, delta("a", seq))
            await tokens.drain(5)
    assert REPLAY <= await redis.xlen(keys.replay(API)) < REPLAY * 2


async def test_a_tick_repeats_the_number_and_carries_nothing(redis: Any) -> None:
    async with listening(redis) as batches:
        tokens = writer_of(redis)
        await tokens.tick()
        tokens.put(API, delta("a", 0))
        await tokens.drain(5)
        await tokens.tick()
        await until(lambda: len(batches) == 2, "a batch and a tick")
    assert [(batch.number, len(batch.deltas)) for batch in batches] == [(1, 1), (1, 0)]
    assert await redis.xlen(keys.replay(API)) == 1


async def test_an_api_process_that_is_not_served_any_more_gets_no_ticks(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(redis) as batches:
        tokens = writer_of(redis)
        tokens.put(API, delta("a", 0))
        await tokens.drain(5)
        monkeypatch.setattr(writer, "TICK_FOR_S", -1.0)
        await tokens.tick()
        monkeypatch.setattr(writer, "TICK_FOR_S", 60.0)
        await tokens.tick()
        await until(lambda: len(batches) == 2, "a batch and a tick")


async def test_an_api_process_with_neither_lease_nor_listener_is_gone(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GONE_AFTER_S", 0.2)
    gone: list[str] = []
    tokens = writer_of(redis, on_gone=gone.append)
    tokens.put(API, delta("a", 0))
    await tokens.drain(5)
    assert gone == [API]
    tokens.put("another", delta("a", 0))
    await tokens.drain(5)
    assert gone == [API, "another"]


async def test_a_lease_is_enough_to_be_there(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "GONE_AFTER_S", 0.2)
    await redis.set(keys.api(API), "alive", ex=60)
    tokens = writer_of(redis)
    tokens.put(API, delta("a", 0))
    await tokens.drain(5)
    await redis.delete(keys.api(API))


async def test_one_that_listens_again_in_time_is_there(redis: Any) -> None:
    """Right after a restart Redis knows no lease, and the API process is about to subscribe."""
    tokens = writer_of(redis)
    tokens.put(API, last("a", 0))
    await asyncio.sleep(0.2)
    reader = TokenReader(redis, API, REPLAY)
    stream = opened(reader, "a")
    task = asyncio.create_task(reader.run())
    await tokens.drain(10)
    await tokens.tick()
    assert sequence(await whole(stream)) == [0]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_one_that_was_given_up_and_comes_back_is_told(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests were dropped: it must not wait for them, and new ones must work."""
    monkeypatch.setattr(writer, "GONE_AFTER_S", 0.1)
    gone: list[str] = []
    tokens = writer_of(redis, on_gone=gone.append)
    tokens.put(API, delta("a", 0))
    await tokens.drain(5)
    assert gone == [API]
    async with reading(redis) as reader:
        stream = opened(reader, "a")
        await tokens.tick()
        error = (await whole(stream))[-1].error
        assert error is not None and error.code == "tokens_lost"
        new = opened(reader, "b")
        tokens.put(API, last("b", 0))
        assert sequence(await whole(new)) == [0]


async def test_a_batch_that_cannot_be_written_ends_its_requests(redis: Any) -> None:
    async with reading(redis) as reader:
        stream, tokens = opened(reader, "a"), writer_of(redis)
        tokens.put(API, delta("a", 0))
        await tokens.drain(5)
        tokens.put(API, Delta(request="a", seq=1, stop_reason=object()))  # type: ignore[arg-type]
        await tokens.drain(5)
        await tokens.tick()
        error = (await whole(stream))[-1].error
        assert error is not None and error.code == "tokens_lost"
        again = opened(reader, "b")
        tokens.put(API, last("b", 0))
        assert sequence(await whole(again)) == [0]


def vector(request: str, nbytes: int) -> Delta:
    return Delta(request=request, seq=0, vector=bytes(nbytes), finish_reason="stop")


async def test_vectors_leave_in_messages_that_a_subscriber_can_take(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BATCH_VECTORS", 1000)
    async with listening(redis) as batches:
        tokens = writer_of(redis)
        for name in "abcde":
            tokens.put(API, vector(name, 400))
        tokens.put(API, last("f", 0))
        await tokens.drain(5)
        await until(lambda: sum(len(one.deltas) for one in batches) == 6, "all of them")
    assert [[one.request for one in batch.deltas] for batch in batches] == [["a", "b", "c"], ["d", "e", "f"]]
    assert [batch.number for batch in batches] == [1, 2]


async def test_the_replay_stream_keeps_no_more_of_vectors_than_fits(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "REPLAY_VECTORS", 100_000)
    async with listening(redis):
        tokens = writer_of(redis)
        for number in range(50):
            tokens.put(API, vector(f"{number}", 7_500))  # 10 000 bytes as base64
            await tokens.drain(5)
        entries = await redis.xrange(keys.replay(API))
        assert 1 < len(entries) < 20
        newest = msgspec.json.decode(entries[-1][1][b"batch"], type=Batch)
        assert (newest.number, newest.deltas[0].request) == (50, "49")
        for seq in range(REPLAY):
            tokens.put(API, delta("text", seq))
            await tokens.drain(5)
        assert await redis.xlen(keys.replay(API)) >= REPLAY, "tokens have the room that they always had"


async def test_a_vector_that_nobody_heard_is_read_again(redis: Any) -> None:
    async with reading(redis) as reader:
        stream, tokens = opened(reader, "a"), writer_of(redis)
        await put_unheard(redis, tokens, vector("a", 8))
        await tokens.tick()
        (found,) = await whole(stream)
        assert (found.vector, reader.gaps) == (bytes(8), 1)
