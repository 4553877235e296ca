"""api.routes.chat: what becomes of a request whose body or serving code fails."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from api import errors, failures, inline_media, metrics
from api.event_stream import Frames
from api.middleware import RequestId
from api.routes import chat
from app.errors.base import TrivetError
from app.errors.media import MediaExpired
from app.errors.serving import NoWorker
from app.settings import Settings
from tests.polling import until
from tests.route_client import route_client


class Model(BaseModel):
    n: int


class Serving:
    def chat_request(self, body: dict[str, Any], _request_id: str) -> Any:
        return Model.model_validate(body)

    async def chat(self, _request: Any) -> Any:
        raise KeyError("a bug")


class Intake:
    """Holds something for every request, and notes what is released; the media of the fields in `borrowed` may be gone,
    and got again."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.borrowed: set[str] = set()
        self.renewed: list[str] = []
        self.comes = asyncio.Event()
        self.comes.set()
        self.media: list[tuple[str, int | None]] = []
        self.shape: Any = None

    async def admit(self, body: dict[str, Any], shape: Any, _tenant: str) -> Any:
        found = [shape.read(path, part) for path, part in shape.parts(body)]
        self.media = [(one.param, one.payload and len(one.payload)) for one in found]
        self.shape = shape
        return self

    def borrows(self, param: str | None) -> bool:
        return param in self.borrowed

    async def renew(self, param: str) -> None:
        await self.comes.wait()
        self.borrowed.remove(param)
        self.renewed.append(param)

    async def release(self) -> None:
        self.released.append("identity")


@pytest.fixture
def services() -> Any:
    adapters = SimpleNamespace(enter=AsyncMock())
    return SimpleNamespace(settings=Settings(), in_flight=0, intake=Intake(), serving=Serving(), adapters=adapters)


@pytest.fixture
async def client(services: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with route_client(chat.router, services) as made:
        yield made


def outcomes(code: str) -> float:
    return metrics.REGISTRY.get_sample_value("trivet_requests_total", {"outcome": code}) or 0.0


async def test_a_body_that_does_not_end_has_the_requests_deadline(client: httpx.AsyncClient, services: Any) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    answer = await asyncio.wait_for(
        client.post("/v1/chat/completions", content=trickle(), headers={"X-Request-Timeout": "0.1"}), 5
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert services.in_flight == 0


async def test_a_wrong_field_counts_as_the_clients_fault(client: httpx.AsyncClient, services: Any) -> None:
    before = outcomes("invalid_request")
    answer = await client.post("/v1/chat/completions", json={"n": "many"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert (outcomes("invalid_request"), services.in_flight) == (before + 1, 0)


@pytest.mark.usefixtures("vllm")
async def test_a_fault_of_the_server_is_in_its_log(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, failures.log.name):
        answer = await client.post("/v1/chat/completions", json={"n": 1}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500
    (record,) = caplog.records
    assert "mine" in record.getMessage() and record.exc_info is not None and record.exc_info[0] is KeyError


class Answer(BaseModel):
    text: str = "hello"


async def _frames(*parts: bytes, wait: asyncio.Event | None = None) -> AsyncGenerator[bytes, None]:
    for part in parts:
        yield part
    if wait is not None:
        await wait.wait()


def answer_with(services: Any, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    async def chat(_request: Any) -> Any:
        assert services.intake.released == [], "not before the answer"
        return answer

    monkeypatch.setattr(services.serving, "chat", chat)


async def test_media_are_released_when_the_answer_is_whole(
    client: httpx.AsyncClient, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(services, monkeypatch, Answer())
    assert (await client.post("/v1/chat/completions", json={"n": 1})).json() == {"text": "hello"}
    assert services.intake.released == ["identity"]


async def test_a_large_medium_is_not_kept_while_the_request_runs(
    client: httpx.AsyncClient, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def chat(_request: Any) -> Any:
        assert services.intake.shape.payloads == {}
        return Answer()

    monkeypatch.setattr(services.serving, "chat", chat)
    url = {"url": "data:image/png;base64," + "A" * inline_media.LARGE}
    content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": url}]
    body = {"n": 1, "messages": [{"role": "user", "content": content}]}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert services.intake.media == [("messages[0].content[1].image_url", inline_media.LARGE)]


async def test_media_are_released_when_the_stream_ends(
    client: httpx.AsyncClient, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(services, monkeypatch, _frames(b"data: 1\n\n", b"data: [DONE]\n\n"))
    answer = await client.post("/v1/chat/completions", json={"n": 1})
    assert answer.text == "data: 1\n\ndata: [DONE]\n\n"
    assert services.intake.released == ["identity"]


async def test_media_are_released_when_the_request_fails(client: httpx.AsyncClient, services: Any) -> None:
    assert (await client.post("/v1/chat/completions", json={"n": "many"})).status_code == 400
    assert services.intake.released == ["identity"]


async def test_media_are_released_when_the_client_leaves(services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first token, and between two."""
    for answer in (_frames(wait=asyncio.Event()), _frames(b"data: 1\n\n", wait=asyncio.Event())):
        services.intake.released.clear()
        answer_with(services, monkeypatch, answer)
        await _leave_soon(services)
        await until(lambda: services.intake.released, "the release")
        assert (services.intake.released, services.in_flight) == (["identity"], 0)


async def _slow(started: asyncio.Event, go: asyncio.Event, error: Exception | None = None) -> Frames:
    started.set()
    await go.wait()
    if error is not None:
        raise error
    yield b"data: 1\n\n"
    yield b"data: [DONE]\n\n"


async def _asked(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"n": 1, "stream": True})


@pytest.fixture
def impatient(services: Any) -> Any:
    services.settings.api.sse_keep_alive_s = 0.02
    return services


async def test_a_first_token_that_takes_long_follows_a_comment(
    client: httpx.AsyncClient, impatient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = asyncio.Event(), asyncio.Event()
    answer_with(impatient, monkeypatch, _slow(started, go))
    asyncio.get_running_loop().call_later(0.2, go.set)
    before = outcomes("ok")
    answer = await _asked(client)
    assert (answer.status_code, answer.text) == (200, ": ping\n\ndata: 1\n\ndata: [DONE]\n\n")
    assert (impatient.intake.released, impatient.in_flight, outcomes("ok")) == (["identity"], 0, before + 1)


async def test_an_error_after_the_comment_ends_the_stream(
    client: httpx.AsyncClient, impatient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = asyncio.Event(), asyncio.Event()
    answer_with(impatient, monkeypatch, _slow(started, go, NoWorker("no worker for: decode")))
    asyncio.get_running_loop().call_later(0.2, go.set)
    before = outcomes("no_worker")
    answer = await _asked(client)
    ping, error, *end = answer.text.split("\n\n")
    assert (answer.status_code, ping, end) == (200, ": ping", ["data: [DONE]", ""])
    assert '"code":"no_worker"' in error
    assert (impatient.intake.released, impatient.in_flight, outcomes("no_worker")) == (["identity"], 0, before + 1)


@pytest.mark.parametrize("body", [{"n": 1}, {"n": 1, "stream": False}])
async def test_a_whole_answer_waits_for_its_status(
    client: httpx.AsyncClient, impatient: Any, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    async def chat(_request: Any) -> Any:
        await asyncio.sleep(0.1)
        raise NoWorker("no worker for: decode")

    monkeypatch.setattr(impatient.serving, "chat", chat)
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 503


async def test_an_error_before_the_comment_has_its_status(
    client: httpx.AsyncClient, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = asyncio.Event(), asyncio.Event()
    answer_with(services, monkeypatch, _slow(started, go, NoWorker("no worker for: decode")))
    go.set()
    assert (await _asked(client)).status_code == 503


async def test_a_client_that_leaves_after_the_comment_ends_the_work(
    impatient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def chat(_request: Any) -> Any:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(impatient.serving, "chat", chat)
    await _leave_soon(impatient, b'{"n": 1, "stream": true}', 0.2)
    assert started.is_set()
    await asyncio.wait_for(ended.wait(), 5)
    await until(lambda: impatient.intake.released, "the release")
    assert (impatient.intake.released, impatient.in_flight) == (["identity"], 0)


async def _leave_soon(services: Any, content: bytes = b'{"n": 1}', after_s: float = 0.05) -> None:
    """A request whose client closes its connection a moment after its body, as a server tells it."""
    app = FastAPI()
    app.state.services = services
    app.add_middleware(RequestId)
    errors.install(app)
    app.include_router(chat.router)
    body = iter([content])

    async def receive() -> dict[str, Any]:
        for part in body:
            return {"type": "http.request", "body": part, "more_body": False}
        await asyncio.sleep(after_s)
        return {"type": "http.disconnect"}

    async def send(_message: dict[str, Any]) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    await asyncio.wait_for(app(scope | {"asgi": {"version": "3.0"}}, receive, send), 10)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("borrowed", "renewed"), [(["a"], ["a"]), (["a", "b", "c"], ["a", "b"]), (["b", "c"], []), ([], [])]
)
@pytest.mark.parametrize("error", [MediaExpired, NoWorker])
async def test_a_medium_that_was_referred_to_and_is_gone_is_got_again_once(
    client: httpx.AsyncClient,
    services: Any,
    stream: bool,
    borrowed: list[str],
    renewed: list[str],
    error: type[TrivetError],
) -> None:
    """First the field `a` has none, then `b`, and from then on `b`."""
    runs: list[Any] = []

    async def fail(request: Any) -> Any:
        runs.append(request)
        failure = error("no", param="b" if runs[1:] else "a")
        if not stream:
            raise failure

        async def frames() -> Any:
            raise failure
            yield b""

        return frames()

    services.intake.borrowed = {*borrowed}
    services.serving.chat = fail
    found = await client.post("/v1/chat/completions", json={"n": 1})
    assert (found.status_code, found.json()["error"]["code"]) == (503, error.code)
    renewed = renewed if error is MediaExpired else []
    assert services.intake.renewed == renewed and len(runs) == len(renewed) + 1
    assert services.intake.released == ["identity"]


async def test_a_medium_that_does_not_come_again_has_the_requests_deadline(
    client: httpx.AsyncClient, services: Any
) -> None:
    async def fail(_request: Any) -> Any:
        raise MediaExpired("gone", param="a")

    services.intake.borrowed = {"a"}
    services.intake.comes.clear()
    services.serving.chat = fail
    asking = client.post("/v1/chat/completions", json={"n": 1}, headers={"X-Request-Timeout": "0.2"})
    found = await asyncio.wait_for(asking, 10)
    assert (found.status_code, found.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert services.intake.released == ["identity"]
