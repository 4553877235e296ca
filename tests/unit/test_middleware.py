"""api.middleware, under a real ASGI application."""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from api import errors
from api.middleware import BodyLimit, RequestId, body_limit, body_memory
from api.middleware.body_limit import Turns, relieve
from api.middleware.body_memory import BodyMemory

LIMIT = 1000
MB = 1 << 20


def application(read: list[int]) -> FastAPI:
    app = FastAPI()
    app.add_middleware(BodyLimit, max_bytes=lambda: LIMIT, memory=BodyMemory(LIMIT))
    app.add_middleware(RequestId)
    errors.install(app)

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, Any]:
        body = b""
        async for chunk in request.stream():
            body += chunk
            read.append(len(chunk))
        return {"size": len(body), "id": request.state.request_id}

    @app.post("/typed")
    async def typed(body: dict[str, Any]) -> int:
        return len(body)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def frames() -> AsyncIterator[str]:
            yield "a"
            yield "b"

        return StreamingResponse(frames())

    return app


class Client:
    def __init__(self) -> None:
        self.read: list[int] = []
        self.app = application(self.read)

    async def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.request(method, path, **options)


async def chunks(number: int, size: int = 100) -> AsyncIterator[bytes]:
    for _ in range(number):
        yield bytes(size)


def refused(response: httpx.Response) -> None:
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("request_too_large", "invalid_request_error")
    assert "api.max_body_mb allows (0.001 MB)" in error["message"]
    assert "x-request-id" in response.headers


async def test_a_body_at_the_limit_is_taken() -> None:
    response = await Client()("POST", "/echo", content=bytes(LIMIT))
    assert (response.status_code, response.json()["size"]) == (200, LIMIT)


async def test_a_declared_body_over_it_is_refused_unread() -> None:
    client = Client()
    response = await client("POST", "/echo", content=bytes(LIMIT + 1))
    refused(response)
    assert response.headers["connection"] == "close" and client.read == []


async def test_an_undeclared_body_is_counted_as_it_comes() -> None:
    client = Client()
    response = await client("POST", "/echo", content=chunks(10))
    assert (response.status_code, response.json()["size"]) == (200, LIMIT)
    client = Client()
    refused(await client("POST", "/echo", content=chunks(1000)))
    assert sum(client.read) <= LIMIT, "reading goes on after the limit"


async def test_a_declaration_that_lies_is_no_way_around() -> None:
    client = Client()
    refused(await client("POST", "/echo", content=chunks(1000), headers={"content-length": "5"}))
    assert sum(client.read) <= LIMIT


async def test_a_typed_route_says_the_same() -> None:
    refused(await Client()("POST", "/typed", content=chunks(1000)))


@pytest.mark.parametrize("declared", ["-5", "abc", "5, 5", "٣", "9" * 5000])
async def test_a_nonsense_declaration_is_no_error_of_ours(declared: str) -> None:
    response = await Client()("POST", "/echo", content=chunks(1), headers={"content-length": declared.encode()})
    assert response.status_code in (200, 413)


@pytest.mark.parametrize("given", ["abc-1.2:3_X", "a", "x" * 64])
async def test_a_sane_id_is_kept(given: str) -> None:
    response = await Client()("POST", "/echo", headers={"X-Request-Id": given})
    assert response.headers["x-request-id"] == given == response.json()["id"]


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "a\tb", "<script>", "ü", "a;b", None])
async def test_any_other_is_replaced(given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode()}
    response = await Client()("POST", "/echo", headers=headers)
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    assert response.json()["id"] == response.headers["x-request-id"]


async def test_two_requests_have_two_ids() -> None:
    client = Client()
    first, second = await client("POST", "/echo"), await client("POST", "/echo")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/stream"), ("GET", "/nowhere"), ("GET", "/echo")])
async def test_every_answer_has_one(method: str, path: str) -> None:
    response = await Client()(method, path)
    assert len(response.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("layer", [RequestId, lambda app: BodyLimit(app, lambda: 0, BodyMemory(0))])
async def test_what_is_not_http_passes(layer: Any) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    await layer(app)({"type": "lifespan"}, "receive", "send")
    assert seen == [({"type": "lifespan"}, "receive", "send")]


def served(memory: BodyMemory, seen: list[int]) -> httpx.AsyncClient:
    app = FastAPI()
    errors.install(app)

    @app.post("/{left}")
    async def read(request: Request, left: int) -> None:
        await request.body()
        seen.append(memory.free)
        relieve(request.scope, left)
        seen.append(memory.free)

    app.add_middleware(BodyLimit, max_bytes=lambda: 4 * MB, memory=memory)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api")


async def test_a_large_body_takes_memory_for_as_long_as_it_is_there() -> None:
    memory, seen = BodyMemory(5 * MB), []
    async with served(memory, seen) as client:
        await client.post("/0", content=bytes(3 * MB))
        await client.post(f"/{2 * MB}", content=bytes(3 * MB))
        await client.post("/0", content=b"x")
    assert seen == [2 * MB, 5 * MB, 2 * MB, 3 * MB, 5 * MB, 5 * MB]
    assert memory.free == 5 * MB


async def test_one_of_unknown_length_takes_all_that_it_may_until_it_is_whole() -> None:
    memory, seen = BodyMemory(5 * MB), []
    free: list[int] = []

    async def pieces(number: int) -> AsyncIterator[bytes]:
        for _ in range(number):
            yield bytes(MB // 2)
            free.append(memory.free)

    async with served(memory, seen) as client:
        await client.post("/0", content=pieces(4))
        await memory.take(5 * MB)
        await asyncio.wait_for(client.post("/0", content=chunks(10, 1000)), 5)
    assert (seen, free) == ([3 * MB, 5 * MB, 0, 0], [MB, MB, MB, MB])


async def test_a_body_that_finds_no_memory_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "WAIT_S", 0.01)
    memory, seen = BodyMemory(3 * MB), []
    await memory.take(3 * MB)
    async with served(memory, seen) as client:
        found = await client.post("/0", content=bytes(2 * MB))
        assert (found.status_code, found.json()["error"]["code"]) == (503, "body_memory_full")
        assert found.headers["retry-after"] == "1"
        assert (await client.post("/0", content=b"x")).status_code == 200


@pytest.mark.parametrize("declared", [{"content-length": str(2 * MB)}, {}], ids=["declared", "undeclared"])
async def test_who_sends_too_slowly_gives_the_memory_back(
    declared: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_limit, "BEGIN_S", 0.1)
    monkeypatch.setattr(body_limit, "LEAST_RATE", 10 * MB)

    async def drip() -> AsyncIterator[bytes]:
        yield bytes(body_limit.PACED + 1)
        for _ in range(300):
            await asyncio.sleep(0.01)
            yield b"x"

    memory, seen = BodyMemory(5 * MB), []
    async with served(memory, seen) as client:
        found = await client.post("/0", content=drip(), headers=declared)
    assert (found.status_code, found.json()["error"]["message"]) == (408, "the body came slower than 10485 KB a second")
    assert (seen, memory.free) == ([], 5 * MB)


async def test_who_sends_fast_enough_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As may a small body, which takes no memory from others."""
    monkeypatch.setattr(body_limit, "BEGIN_S", 0.5)
    sizes = [MB // 8] * 10 + [1] * 10

    async def pieces(*sizes: int) -> AsyncIterator[bytes]:
        for size in sizes:
            yield bytes(size)
            await asyncio.sleep(0.05)

    async with served(BodyMemory(5 * MB), []) as client:
        assert (await client.post("/0", content=pieces(*sizes))).status_code == 200
        assert (await client.post("/0", content=pieces(*[1] * 20))).status_code == 200


async def test_pieces_of_large_bodies_take_turns() -> None:
    """However many come at once, the loop gets round to everything else after each."""
    turns, passes, order = Turns(), [0], []

    async def loop() -> None:
        while True:
            passes[0] += 1
            await asyncio.sleep(0)

    async def piece(number: int) -> None:
        await turns.take(number)
        order.append((number, passes[0]))

    other = asyncio.create_task(loop())
    await asyncio.gather(*(piece(number) for number in range(20)))
    other.cancel()
    assert [number for number, _ in order] == list(range(20))
    assert len({at for _, at in order}) == 20


async def test_the_body_that_began_first_is_whole_first() -> None:
    """Bodies that all end at once would keep the loop for what is done with a whole one, times their number."""
    turns, order = Turns(), []

    async def body(number: int) -> None:
        for _ in range(5):
            await turns.take(number)
        order.append(number)

    await asyncio.gather(*(body(turns.number()) for _ in range(8)))
    assert order == list(range(8))


async def test_requests_that_begin_and_bodies_that_go_on_take_every_second_turn() -> None:
    """However many come, those that are there get on, and the other way round."""
    turns, order = Turns(), []

    async def begun(name: str) -> None:
        assert await turns.begin()
        order.append(name)

    async def piece() -> None:
        await turns.take(turns.number())
        order.append("piece")

    await asyncio.gather(piece(), piece(), *(begun(f"new {number}") for number in range(4)), piece())
    assert order == ["piece", "new 0", "piece", "new 1", "piece", "new 2", "new 3"]


async def test_a_large_body_that_does_not_get_to_begin_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    monkeypatch.setattr(body_limit, "BEGIN_WAIT_S", 0.05)
    monkeypatch.setattr(body_limit, "_pause", go_on.wait)
    async with served(BodyMemory(9 * MB), []) as client, asyncio.timeout(10):
        first, second, third = (asyncio.create_task(client.post("/0", content=bytes(MB))) for _ in range(3))
        refused = await third
        go_on.set()
        assert [(await one).status_code for one in (first, second)] == [200, 503], (
            "the second had a pause without an end"
        )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "body_memory_full")
    assert refused.headers["retry-after"] == "1"


async def test_a_loop_that_is_late_has_longer_pauses() -> None:
    """What waits has a dozen turns of the loop to its answer: one piece in each is too many."""
    turns, passes, order = Turns(), [0], []

    async def busy() -> None:
        while True:
            passes[0] += 1
            time.sleep(0.005)  # noqa: ASYNC251  (it is the loop that is to be late)
            await asyncio.sleep(0)

    async def piece(number: int) -> None:
        await turns.take(number)
        order.append(passes[0])

    other = asyncio.create_task(busy())
    await asyncio.gather(*(piece(number) for number in range(6)))
    other.cancel()
    # The last has nobody that waits behind it, and no pause.
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(order[:5]))


async def test_a_body_whose_client_leaves_passes_its_turn_on() -> None:
    turns = Turns()
    bodies = [asyncio.create_task(turns.take(number)) for number in range(4)]
    await asyncio.sleep(0)
    bodies[1].cancel()
    await asyncio.sleep(0)
    bodies[2].cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*bodies, return_exceptions=True)
        await turns.take(4)
    assert [one.cancelled() for one in bodies] == [False, True, True, False]
