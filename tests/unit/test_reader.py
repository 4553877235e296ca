"""app.streaming.reader: a request's stream. tests/integration has the channel and the replay stream."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors.base import Failure
from app.messages.deltas import Delta
from app.messages.plans import Assignment
from app.streaming import RequestStream

WORKER = Assignment(worker="w", incarnation="1")
OTHER = Assignment(worker="o", incarnation="1")
PLANNED = Assignment(worker="p", incarnation="1")
LOST = Failure(503, "worker_lost", "gone")


def stream(attempt: int = 0) -> RequestStream:
    return RequestStream("r", attempt, frozenset({PLANNED}))


def delta(seq: int, attempt: int = 0, **changes: Any) -> Delta:
    return Delta(request="r", attempt=attempt, seq=seq, token_ids=[seq], **changes)


async def got(one: RequestStream) -> list[Delta]:
    return await asyncio.wait_for(one.get(), 5)


async def nothing(one: RequestStream) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.get(), 0.01)


async def test_what_came_while_nobody_read_comes_at_once() -> None:
    one = stream()
    for seq in range(3):
        one.feed(delta(seq), WORKER)
    assert await got(one) == [delta(0), delta(1), delta(2)]
    await nothing(one)


async def test_a_reader_that_waits_is_woken() -> None:
    one = stream()
    reading = asyncio.create_task(got(one))
    await asyncio.sleep(0)
    one.feed(delta(0), WORKER)
    one.feed(delta(1), WORKER)
    assert await reading == [delta(0), delta(1)]


async def test_a_reader_that_gave_up_costs_nothing() -> None:
    one = stream()
    await nothing(one)
    one.feed(delta(0), WORKER)
    assert await got(one) == [delta(0)]


async def test_duplicates_are_dropped() -> None:
    one = stream()
    for seq in (0, 0, 1, 0, 1, 2):
        one.feed(delta(seq), WORKER)
    assert [each.seq for each in await got(one)] == [0, 1, 2]


async def test_another_attempts_deltas_are_dropped() -> None:
    one = stream(attempt=1)
    one.feed(delta(0, attempt=0), WORKER)
    one.feed(delta(0, attempt=0, error=LOST), WORKER)
    one.feed(delta(0, attempt=2), WORKER)
    await nothing(one)
    one.feed(delta(0, attempt=1), WORKER)
    assert [each.attempt for each in await got(one)] == [1]


async def test_a_hole_is_an_error_and_no_delta() -> None:
    one = stream()
    one.feed(delta(0), WORKER)
    one.feed(delta(2), WORKER)
    first, last = await got(one)
    assert first == delta(0)
    assert last.error is not None and last.error.code == "tokens_lost" and last.token_ids == []
    assert "part 1 " in last.error.message


async def test_an_error_ends_it_whatever_its_number() -> None:
    for seq in (0, 1, 5, 1 << 31):
        one = stream()
        one.feed(delta(0), WORKER)
        one.feed(delta(seq, error=LOST), WORKER)
        assert [each.error for each in await got(one)] == [None, LOST]


@pytest.mark.parametrize("end", [{"finish_reason": "stop"}, {"error": LOST}])
async def test_nothing_comes_after_the_end(end: dict[str, Any]) -> None:
    """A reader looks at the last delta to know how the stream ended."""
    one = stream()
    one.feed(delta(0), WORKER)
    one.feed(delta(1, **end), WORKER)
    one.feed(delta(2), WORKER)
    one.fail(Failure(504, "deadline_exceeded", "late"))
    assert await got(one) == [delta(0), delta(1, **end)]
    one.feed(delta(3), WORKER)
    await nothing(one)


async def test_a_failure_from_outside_ends_it() -> None:
    one = stream()
    one.fail(LOST)
    one.feed(delta(0), WORKER)
    one.fail(Failure(504, "deadline_exceeded", "late"))
    (last,) = await got(one)
    assert last.error == LOST


@given(st.lists(st.integers(0, 8), max_size=40))
def test_whatever_comes_in_no_hole_is_passed_over(numbers: list[int]) -> None:
    one = stream()
    for seq in numbers:
        one.feed(delta(seq), WORKER)
    taken = list(one._ready)
    good = [each.seq for each in taken if each.error is None]
    assert good == list(range(len(good)))
    beyond = [seq for seq in numbers if seq > len(good)]
    assert (taken[-1].error is not None if taken else False) == bool(beyond)


async def test_whoever_speaks_is_whom_it_depends_on() -> None:
    one = stream(attempt=1)
    one.feed(delta(0), WORKER)
    assert one.workers == {PLANNED}, "another attempt's worker"
    one.feed(delta(0, attempt=1), WORKER)
    assert one.workers == {WORKER}
    one.feed(delta(1, attempt=1), OTHER)
    assert one.workers == {OTHER}, "what a prefill worker has to say comes before the answer"


async def begun() -> tuple[RequestStream, asyncio.Task[list[Delta]]]:
    """A stream whose answer has begun, and a reader that waits for more of it."""
    one = stream()
    one.feed(delta(0), WORKER, 0.0)
    assert await got(one) == [delta(0)], "the first token waits for nobody"
    reading = asyncio.create_task(got(one))
    assert await is_waiting(reading)
    return one, reading


async def is_waiting(reading: asyncio.Task[list[Delta]]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not reading.done()


async def test_where_streams_are_many_a_token_waits_for_the_next() -> None:
    one, reading = await begun()
    one.feed(delta(1), WORKER, 1.0)
    assert await is_waiting(reading)
    one.feed(delta(2), WORKER, 1.1)
    assert await reading == [delta(1), delta(2)]
    assert not one.hand_on(9.0), "nothing waits any more"


async def test_what_is_handed_on_before_the_first_token_does_not_make_it_wait() -> None:
    one = stream()
    one.feed(Delta(request="r", seq=0), WORKER, 0.0)
    await got(one)
    reading = asyncio.create_task(got(one))
    assert await is_waiting(reading)
    one.feed(delta(1), WORKER, 0.1)
    assert await reading == [delta(1)]


@pytest.mark.parametrize("end", [{"finish_reason": "stop"}, {"error": LOST}])
async def test_the_end_does_not_wait(end: dict[str, Any]) -> None:
    one, reading = await begun()
    one.feed(delta(1, **end), WORKER, 1.0)
    assert await reading == [delta(1, **end)]
    one.feed(delta(2), WORKER, 1.1)
    await nothing(one)


async def test_a_failure_from_outside_takes_along_what_waits() -> None:
    one, reading = await begun()
    one.feed(delta(1), WORKER, 1.0)
    one.fail(LOST)
    first, last = await reading
    assert first == delta(1) and last.error == LOST


async def test_a_token_does_not_wait_for_long() -> None:
    one, reading = await begun()
    one.feed(delta(1), WORKER, 1.0)
    assert one.hand_on(0.9) and await is_waiting(reading)
    assert not one.hand_on(1.0)
    assert await reading == [delta(1)]


async def test_a_reader_that_comes_takes_what_waits_and_is_not_woken_for_it() -> None:
    one = stream()
    one.feed(delta(0), WORKER, 0.0)
    await got(one)
    one.feed(delta(1), WORKER, 1.0)
    assert await got(one) == [delta(1)]
    reading = asyncio.create_task(got(one))
    assert await is_waiting(reading)
    assert not one.hand_on(9.0) and await is_waiting(reading)
    one.feed(delta(2, finish_reason="stop"), WORKER)
    await reading
