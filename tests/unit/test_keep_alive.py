"""api.middleware.keep_alive: comments come in time, between events and nowhere else. In virtual time."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from api.middleware.keep_alive import PING, KeepAlive
from tests.virtual_time import run

INTERVAL_S = 10.0
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
DONE = b"data: [DONE]\n\n"
#: Silence in seconds before a piece of body.
Piece = tuple[float, bytes]
Sent = list[tuple[float, dict[str, Any]]]


async def application(pieces: list[Piece], headers: list[tuple[bytes, bytes]], linger_s: float, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for silence, body in pieces:
        await asyncio.sleep(silence)
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await asyncio.sleep(linger_s)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    await asyncio.sleep(100 * INTERVAL_S)


def answered(
    pieces: list[Piece],
    headers: list[tuple[bytes, bytes]] = EVENT_STREAM,
    linger_s: float = 0.0,
    slow_s: float = 0.0,
) -> Sent:
    """(when, message) of all that reached the server, which takes `slow_s` to send a message."""
    sent: Sent = []

    async def main() -> None:
        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await application(pieces, headers, linger_s, send)

        async def send(message: Any) -> None:
            if slow_s:
                await asyncio.sleep(slow_s)
            sent.append((asyncio.get_running_loop().time(), message))

        await KeepAlive(app, INTERVAL_S)({"type": "http"}, None, send)  # type: ignore[arg-type]
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing goes on after the answer"

    run(main())
    return sent


def bodies(sent: Sent) -> list[bytes]:
    return [message["body"] for _, message in sent if message["type"] == "http.response.body"]


def pings(sent: Sent) -> list[float]:
    return [when for when, message in sent if message.get("body") == PING]


def events(raw: bytes) -> list[tuple[Any, str]]:
    """As OpenAI's client reads them."""

    def once() -> Any:
        yield raw

    return [(one.event, one.data) for one in SSEDecoder().iter_bytes(once())]


def test_silence_is_broken_once_an_interval() -> None:
    sent = answered([(0, b"data: 1\n\n"), (35, b"data: 2\n\n"), (9.5, b"data: 3\n\n")])
    assert pings(sent) == [10, 20, 30]
    assert b"".join(bodies(sent)) == b"data: 1\n\n" + PING * 3 + b"data: 2\n\ndata: 3\n\n"


def test_an_answer_that_has_begun_and_says_nothing_is_silent_too() -> None:
    assert pings(answered([(25, b"data: 1\n\n")])) == [10, 20]


def test_a_busy_stream_gets_none() -> None:
    assert pings(answered([(9.9, b"data: 1\n\n")] * 20)) == []


@pytest.mark.parametrize(
    "beginning", [b"data: 1\n", b"data: 1", b"data: 1\r\n", b"data: 1\r\n\r", b"event: x\r\ndata: 1\n"]
)
def test_within_an_event_there_is_none(beginning: bytes) -> None:
    sent = answered([(0, b"data: 0\n\n"), (0, beginning), (55, b"\n\n"), (15, DONE)])
    assert pings(sent) == [65]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n"])
def test_an_events_end_may_come_in_pieces(end: bytes) -> None:
    pieces = [(0.0, b"data: 1")] + [(0.0, end[at : at + 1]) for at in range(len(end))]
    assert pings(answered([*pieces, (15.0, DONE)])) == [10]


def test_after_the_last_event_there_is_none() -> None:
    assert pings(answered([(0, b"data: 1\n\n"), (0, DONE)], linger_s=100)) == []
    assert pings(answered([(0, b"data: 1\n\ndata: [DO"), (0, b"NE]\n\n")], linger_s=100)) == []


def test_a_text_that_says_done_is_no_end() -> None:
    assert pings(answered([(0, b'data: {"text": "data: [DONE]"}\n\n'), (15, DONE)])) == [10]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-type", b"application/json")],
        [],
        [*EVENT_STREAM, (b"content-length", b"9")],
        [*EVENT_STREAM, (b"Content-Encoding", b"gzip")],
    ],
)
def test_other_answers_are_let_alone(headers: list[tuple[bytes, bytes]]) -> None:
    assert bodies(answered([(0, b"data: 1\n\n"), (100, b"data: 2\n\n")], headers)) == [
        b"data: 1\n\n",
        b"data: 2\n\n",
        b"",
    ]


ALPHABET = [b"data: ", b"x", b"[DONE]", b"\n", b"\r\n", b"\r", b"\n\n", b": c", b"data: 1\n\n", DONE]


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 3.0, 9.0, 10.0, 11.0, 25.0]), st.sampled_from(ALPHABET)), max_size=12),
    st.sampled_from([0.0, 30.0]),
    st.sampled_from([0.0, 0.5, 4.0, 12.0]),
)
def test_whatever_comes_in_whatever_pieces(pieces: list[Piece], linger_s: float, slow_s: float) -> None:
    sent = answered(pieces, linger_s=linger_s, slow_s=slow_s)
    own = [body for _, body in pieces] + [b""]
    assert [body for body in bodies(sent) if body != PING] == own, "all of it, in order"
    before = b""
    for body in bodies(sent):
        if body == PING:
            assert before == b"" or before.endswith((b"\n\n", b"\n\r\n")), "between events"
            assert not before.endswith(DONE)
        else:
            before += body
    assert sent[-1][1]["more_body"] is False, "nothing after the end"
    assert events(b"".join(bodies(sent))) == events(b"".join(own)), "and clients read the same"


@given(st.lists(st.floats(0, 60), min_size=1, max_size=8))
def test_no_silence_between_events_is_longer_than_an_interval(silences: list[float]) -> None:
    sent = answered([(silence, b"data: 1\n\n") for silence in silences])
    times = [0.0] + [when for when, _ in sent[:-1]]
    assert max(after - before for before, after in zip(times, times[1:], strict=False)) <= INTERVAL_S + 0.01
    assert len(pings(sent)) <= sum(silences) / INTERVAL_S


def served(send: Callable[[Any], Any], app: Callable[[Any], Any]) -> Any:
    async def main() -> Any:
        async def application(_scope: Any, _receive: Any, inner: Any) -> None:
            await inner({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
            await app(inner)

        try:
            await KeepAlive(application, INTERVAL_S)({"type": "http"}, None, send)  # type: ignore[arg-type]
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return run(main())


def test_while_a_client_does_not_read_no_comments_heap_up() -> None:
    begun: list[bytes] = []

    async def send(message: Any) -> None:
        begun.append(message.get("body", b""))
        if len(begun) == 2:
            await asyncio.sleep(55)

    async def app(inner: Any) -> None:
        await inner({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        begun.append(b"taken")

    served(send, app)
    assert begun == [b"", b"data: 1\n\n", b"taken"]


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("a bug")])
def test_a_comment_that_cannot_be_sent_is_the_last(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    tried: list[bytes] = []

    async def send(message: Any) -> None:
        if message.get("body") == PING:
            tried.append(PING)
            raise error

    with caplog.at_level(logging.ERROR):
        served(send, lambda _: asyncio.sleep(100))
    assert tried == [PING]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == (
        [] if isinstance(error, OSError) else [error]
    )


def test_an_application_that_fails_leaves_nothing_behind() -> None:
    async def fail(_: Any) -> None:
        await asyncio.sleep(15)
        raise ValueError("in the middle")

    async def send(_: Any) -> None: ...

    with pytest.raises(ValueError, match="in the middle"):
        served(send, fail)


def test_an_application_that_is_cancelled_while_it_waits_for_a_comment() -> None:
    async def send(message: Any) -> None:
        if message.get("body") == PING:
            await asyncio.sleep(1000)  # a client that does not read

    async def app(inner: Any) -> None:
        async with asyncio.timeout(20):
            await asyncio.sleep(12)
            await inner({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})

    with pytest.raises(TimeoutError):
        served(send, app)


async def test_what_is_not_http_passes() -> None:
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.append(arguments)

    await KeepAlive(app, INTERVAL_S)({"type": "lifespan"}, "receive", "send")  # type: ignore[arg-type]
    assert seen == [({"type": "lifespan"}, "receive", "send")]
