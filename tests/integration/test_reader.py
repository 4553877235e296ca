"""app.streaming.reader on a real Redis, which loses what pub/sub may lose."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import keys
from app.messages.deltas import Batch, Delta
from app.messages.plans import Assignment
from app.redis import connect
from app.streaming import reader as reader_module
from tests.integration.streams import (
    API,
    delta,
    last,
    opened,
    put_unheard,
    quiet,
    reading,
    sequence,
    whole,
    writer_of,
)
from tests.messages import AGG, DECODE, PREFILL


async def test_stale_attempts_and_strangers_are_dropped(redis: Any) -> None:
    async with reading(redis) as reader:
        stream = opened(reader, "a", attempt=1)
        tokens = writer_of(redis)
        tokens.put(API, delta("a", 0, attempt=0))
        tokens.put(API, delta("unknown", 0))
        tokens.put(API, delta("a", 0, attempt=1))
        tokens.put(API, delta("a", 1, attempt=0))
        tokens.put(API, delta("a", 1, attempt=1, finish_reason="stop"))
        assert [(one.attempt, one.seq) for one in await whole(stream)] == [(1, 0), (1, 1)]


async def test_a_closed_request_gets_nothing(redis: Any) -> None:
    async with reading(redis) as reader:
        closed, open_one = opened(reader, "a"), opened(reader, "b")
        reader.close("a")
        reader.close("a")
        tokens = writer_of(redis)
        tokens.put(API, delta("a", 0))
        tokens.put(API, last("b", 0))
        await whole(open_one)
        await quiet(closed)
        assert [one.request_id for one in reader.streams] == ["b"]


async def test_a_gap_is_refilled_in_order(redis: Any) -> None:
    async with reading(redis) as reader:
        stream, other = opened(reader, "a"), opened(reader, "b")
        tokens = writer_of(redis)
        tokens.put(API, delta("a", 0))
        await tokens.drain(5)
        for seq in (1, 2, 3):
            await put_unheard(redis, tokens, delta("a", seq), delta("b", seq - 1))
        tokens.put(API, last("a", 4))
        tokens.put(API, last("b", 3))
        assert sequence(await whole(stream)) == list(range(5))
        assert sequence(await whole(other)) == list(range(4))
        assert reader.gaps == 1


async def test_a_gap_among_other_workers_batches(redis: Any) -> None:
    """The lost batch lies pages deep in the stream that all workers share."""
    async with reading(redis) as reader:
        stream, busy = opened(reader, "a", PREFILL), opened(reader, "b", DECODE)
        quiet_one, loud = writer_of(redis, PREFILL), writer_of(redis, DECODE)
        quiet_one.put(API, delta("a", 0))
        await quiet_one.drain(5)
        await put_unheard(redis, quiet_one, delta("a", 1))
        for seq in range(150):
            loud.put(API, delta("b", seq))
            await loud.drain(5)
        loud.put(API, last("b", 150))
        quiet_one.put(API, last("a", 2))
        assert sequence(await whole(stream)) == [0, 1, 2]
        assert sequence(await whole(busy)) == list(range(151))


async def test_an_old_batch_that_comes_again_is_no_gap(redis: Any) -> None:
    async with reading(redis) as reader:
        stream, tokens = opened(reader, "a"), writer_of(redis)
        for seq in range(3):
            tokens.put(API, delta("a", seq))
            await tokens.drain(5)
        ((_, oldest), *_) = await redis.xrange(keys.replay(API))
        await redis.publish(keys.tokens_channel(API), oldest[b"batch"])
        tokens.put(API, last("a", 3))
        assert sequence(await whole(stream)) == [0, 1, 2, 3]
        assert reader.gaps == 0


async def test_the_loss_of_a_first_batch(redis: Any) -> None:
    async with reading(redis) as reader:
        stream, tokens = opened(reader, "a"), writer_of(redis)
        await put_unheard(redis, tokens, delta("a", 0))
        tokens.put(API, last("a", 1))
        assert sequence(await whole(stream)) == [0, 1]


async def test_the_loss_of_a_last_batch_shows_at_the_next_tick(redis: Any) -> None:
    async with reading(redis) as reader:
        stream, tokens = opened(reader, "a"), writer_of(redis)
        tokens.put(API, delta("a", 0))
        await tokens.drain(5)
        await put_unheard(redis, tokens, last("a", 1))
        await tokens.tick()
        assert sequence(await whole(stream)) == [0, 1]
        await tokens.tick()
        await tokens.tick()
        assert reader.gaps == 1


async def test_a_hole_that_cannot_be_filled_ends_exactly_that_workers_requests(redis: Any) -> None:
    async with reading(redis) as reader:
        mine, mine_too = opened(reader, "a", DECODE), opened(reader, "b", PREFILL, DECODE)
        others, anothers = opened(reader, "c", PREFILL), opened(reader, "d", AGG)
        restarted = opened(reader, "e", Assignment(worker=DECODE.worker, incarnation="d0"))
        tokens = writer_of(redis, DECODE)
        tokens.put(API, delta("a", 0))
        await tokens.drain(5)
        await put_unheard(redis, tokens, delta("a", 1))
        await redis.delete(keys.replay(API))
        # The next batch has nothing of theirs, and still they must not wait.
        tokens.put(API, delta("unknown", 0))
        for stream in (mine, mine_too):
            error = (await whole(stream))[-1].error
            assert error is not None and (error.code, error.status) == ("tokens_lost", 500)
        fine = writer_of(redis, PREFILL)
        fine.put(API, last("c", 0))
        fine.put(API, last("d", 0))
        fine.put(API, last("e", 0))
        for stream in (others, anothers, restarted):
            assert sequence(await whole(stream)) == [0]


async def test_a_hole_in_part_filled_is_still_a_hole(redis: Any) -> None:
    async with reading(redis) as reader:
        stream, tokens = opened(reader, "a"), writer_of(redis)
        await put_unheard(redis, tokens, delta("a", 0))
        await redis.delete(keys.replay(API))
        await put_unheard(redis, tokens, delta("a", 1))
        tokens.put(API, delta("a", 2))
        deltas = await whole(stream)
        assert [one.error.code for one in deltas if one.error] == ["tokens_lost"]
        assert not [one for one in deltas if one.token_ids]


async def test_what_is_no_batch_is_a_hole_and_stops_nothing(redis: Any) -> None:
    async with reading(redis) as reader:
        tokens = writer_of(redis)
        for rubbish in (b"\xff\xfe", b"hello", b"{}", b'{"worker":5}', b'["a"]'):
            await redis.publish(keys.tokens_channel(API), rubbish)
            await redis.xadd(keys.replay(API), {"batch": rubbish})
        await redis.xadd(keys.replay(API), {"other": "field"})
        stream = opened(reader, "a")
        await put_unheard(redis, tokens, delta("a", 0))
        tokens.put(API, last("a", 1))
        assert sequence(await whole(stream)) == [0, 1]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


#: For each batch, how often it is published: 0 is lost, 2 is a duplicate.
PUBLISHED = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=3)


@settings(max_examples=60)
@given(PUBLISHED, st.randoms(use_true_random=False))
def test_whatever_is_lost_or_doubled_the_whole_arrives(
    redis_url: str, runner: asyncio.Runner, published: list[list[int]], random: Any
) -> None:
    """With the replay stream intact. Several workers, two requests each; a tick at the end."""
    runner.run(check_pattern(redis_url, published, random))


async def check_pattern(url: str, published: list[list[int]], random: Any) -> None:
    redis = connect(url, 5.0, name="test")
    await redis.flushall()
    async with reading(redis) as reader:
        streams = []
        queues = []
        for n, times in enumerate(published):
            one = Assignment(worker=f"w{n}", incarnation="1")
            streams += [opened(reader, f"{n}-{request}", one) for request in "ab"]
            batches = []
            for seq in range(len(times)):
                make = last if seq == len(times) - 1 else delta
                batches.append(Batch(one.worker, "1", seq + 1, [make(f"{n}-{request}", seq) for request in "ab"]))
            queues.append(list(zip(batches, times, strict=True)))
        pipe = redis.pipeline(transaction=False)
        while any(queues):
            batch, times = random.choice([queue for queue in queues if queue]).pop(0)
            payload = msgspec.json.encode(batch)
            pipe.xadd(keys.replay(API), {"batch": payload})
            for _ in range(times):
                pipe.publish(keys.tokens_channel(API), payload)
        for n, times in enumerate(published):
            pipe.publish(keys.tokens_channel(API), msgspec.json.encode(Batch(f"w{n}", "1", len(times))))
        await pipe.execute()
        for stream in streams:
            length = len(published[int(stream.request_id.split("-")[0])])
            assert sequence(await whole(stream, 5)) == list(range(length))
            await quiet(stream)
        lost = sum(0 in times for times in published)
        assert (reader.gaps > 0) == (lost > 0)
    await redis.aclose()


async def test_a_token_that_waits_for_another_is_handed_on_all_the_same(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MANY_STREAMS", 1)
    async with reading(redis) as reader:
        stream = opened(reader, "a")
        tokens = writer_of(redis)
        for seq in range(3):
            tokens.put(API, delta("a", seq))
            await tokens.drain(5)
        got: list[Delta] = []
        async with asyncio.timeout(20):
            while len(got) < 3:
                got += await stream.get()
        assert sequence(got) == [0, 1, 2]


async def test_of_many_streams_each_is_whole(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MANY_STREAMS", 3)
    async with reading(redis) as reader:
        streams = {name: opened(reader, name) for name in "abcde"}
        reads = [asyncio.create_task(whole(stream)) for stream in streams.values()]
        tokens = writer_of(redis)
        for seq in range(8):
            for name in streams:
                tokens.put(API, last(name, seq) if seq == 7 else delta(name, seq))
            await tokens.drain(5)
        assert [sequence(deltas) for deltas in await asyncio.gather(*reads)] == [list(range(8))] * 5
