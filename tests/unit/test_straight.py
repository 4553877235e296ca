"""api.middleware.straight: the pieces of a stream pass middleware by, in order, and keep-alive sees them all."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from api.admission import Ticket
from api.context import RequestContext
from api.event_stream import Stream
from api.middleware import KeepAlive, LastResort, RequestId
from tests.virtual_time import run

INTERVAL_S = 10.0
PIECES = ["data: 1", b"\n\n", "data: [DONE]\n\n"]
PING = b": ping\n\n"


async def frames() -> Any:
    for piece in PIECES:
        await asyncio.sleep(1.5 * INTERVAL_S)
        yield piece


async def streamed(_scope: Any, receive: Any, send: Any) -> None:
    services: Any = SimpleNamespace(settings=SimpleNamespace(api=SimpleNamespace(max_in_flight=9)), in_flight=0)
    begun: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(0))
    answer = Stream(frames(), begun, RequestContext("r", 2e9), Ticket(services))
    await answer(_scope, receive, send)


class Looker:
    """Middleware that passes everything on and notes its kind."""

    def __init__(self, app: Any, seen: list[str]) -> None:
        self._app, self._seen = app, seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            self._seen.append(message["type"])
            await send(message)

        await self._app(scope, receive, noted)


@pytest.mark.parametrize("keeps_alive", [True, False])
def test_what_follows_the_start_of_a_stream_passes_middleware_by(keeps_alive: bool) -> None:
    sent: list[Any] = []
    seen: list[str] = []

    async def receive() -> Any:
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    inner: Any = KeepAlive(streamed, INTERVAL_S) if keeps_alive else streamed
    run(RequestId(LastResort(Looker(inner, seen)))({"type": "http", "headers": [], "path": "/"}, receive, send))
    assert seen == ["http.response.start"]
    start, *pieces, end = sent
    assert b"x-request-id" in dict(start["headers"])
    expected = [PING, b"data: 1", b"\n\n", PING, b"data: [DONE]\n\n"]
    assert [one["body"] for one in pieces] == [one for one in expected if keeps_alive or one != PING]
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}


def test_without_middleware_they_go_the_way_of_the_start() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    run(streamed({"type": "http"}, receive, send))
    assert [one.get("body") for one in sent] == [None, b"data: 1", b"\n\n", b"data: [DONE]\n\n", b""]


class Server:
    """As uvicorn does, it has the scope, and the scope its `send`."""

    def __init__(self) -> None:
        self.scope = {"type": "http", "headers": [], "path": "/"}

    async def receive(self) -> Any:
        return await asyncio.Future()

    async def send(self, message: Any) -> None:
        """To nobody."""

    async def answer(self) -> None:
        await RequestId(KeepAlive(streamed, INTERVAL_S))(self.scope, self.receive, self.send)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_a_request_is_gone_with_its_answer_and_waits_for_no_collection_of_cycles() -> None:
    async def main() -> "weakref.ref[Server]":
        server = Server()
        await server.answer()
        await asyncio.sleep(0)
        return weakref.ref(server)

    assert run(main())() is None
