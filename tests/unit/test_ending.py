"""api.ending and the end of a stream: what a client that left has to leave behind, whoever cancels whom."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import StreamingResponse

from api import generation
from api.admission import Ticket
from api.context import RequestContext
from api.ending import to_the_end
from api.event_stream import Stream


async def test_it_ends_although_its_caller_is_cancelled_again_and_again() -> None:
    go, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        done.set()

    caller = asyncio.create_task(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    await asyncio.wait_for(done.wait(), 5)


@pytest.mark.parametrize("starlettes", [True, False])
async def test_a_client_that_leaves_a_stream_leaves_nothing_behind(starlettes: bool) -> None:
    """Under Starlette's own cancel scope too, which cancels at every await of the clean-up."""
    services: Any = SimpleNamespace(settings=SimpleNamespace(api=SimpleNamespace(max_in_flight=9)), in_flight=0)
    ticket, asked, closed = Ticket(services), RequestContext("r", 2e9), asyncio.Event()

    async def close() -> None:
        await asyncio.sleep(0.01)
        closed.set()

    async def breaks() -> None:
        raise RuntimeError("one that fails does not keep the others from closing")

    asked.on_close += [close, breaks]

    async def frames() -> Any:
        try:
            while True:
                await asyncio.sleep(0.01)
                yield "data: {}\n\n"
        finally:
            await asyncio.sleep(0.01)

    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            gone.set()

    stream = generation._stream("data: {}\n\n", frames(), asked, ticket, generation.Generation())
    begun: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(0))
    response = StreamingResponse(stream) if starlettes else Stream(stream, begun, asked, ticket)
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    await asyncio.wait_for(response(scope, receive, send), 5)  # type: ignore[arg-type]
    await asyncio.wait_for(closed.wait(), 5)
    assert services.in_flight == 0


class Left:
    """A client that leaves when it has got so many frames, or no more of which it takes."""

    def __init__(self, takes: int, *, blocks: bool) -> None:
        self._takes = takes
        self._blocks = blocks
        self._gone = asyncio.Event()
        self.got = 0

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.got += bool(message.get("body"))
        if self.got == self._takes:
            self._gone.set()
            if self._blocks:
                await asyncio.Future()


async def deaf() -> Any:
    """Frames without an end, of somebody who takes the first cancellation for his own."""
    yield "data: {}\n\n"
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    while True:
        await asyncio.sleep(0)
        yield "data: {}\n\n"


async def endless() -> Any:
    while True:
        await asyncio.sleep(0)
        yield "data: {}\n\n"


@pytest.mark.parametrize(("frames", "takes", "blocks"), [(deaf, 2, False), (endless, 5, True)], ids=["deaf", "blocked"])
async def test_a_stream_ends_with_its_client_whatever_it_waits_for(frames: Any, takes: int, blocks: bool) -> None:
    services: Any = SimpleNamespace(settings=SimpleNamespace(api=SimpleNamespace(max_in_flight=9)), in_flight=0)
    ticket, asked, closed = Ticket(services), RequestContext("r", 2e9), asyncio.Event()

    async def close() -> None:
        closed.set()

    asked.on_close.append(close)
    client = Left(takes, blocks=blocks)
    stream = generation._stream("data: {}\n\n", frames(), asked, ticket, generation.Generation())
    begun: asyncio.Task[Any] = asyncio.create_task(asyncio.sleep(0))
    response = Stream(stream, begun, asked, ticket)
    scope: Any = {"type": "http"}
    await asyncio.wait_for(response(scope, client.receive, client.send), 5)  # type: ignore[arg-type]
    assert closed.is_set() and services.in_flight == 0
    assert client.got <= takes + 1, "nothing is made for nobody"
