"""api.routes.chat: what becomes of a request whose body or serving code fails."""

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from api import errors, metrics
from api.middleware import RequestId
from api.routes import chat
from app.settings import Settings


class Model(BaseModel):
    n: int


class Serving:
    def chat_request(self, body: dict[str, Any], _request_id: str) -> Any:
        return Model.model_validate(body)

    async def chat(self, _request: Any) -> Any:
        raise KeyError("a bug")


async def nothing(_body: dict[str, Any]) -> None:
    pass


@pytest.fixture
def services() -> Any:
    return SimpleNamespace(settings=Settings(), in_flight=0, intake=SimpleNamespace(admit=nothing), serving=Serving())


@pytest.fixture
async def client(services: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.state.services = services
    app.add_middleware(RequestId)
    errors.install(app)
    app.include_router(chat.router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as made:
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
    with caplog.at_level(logging.ERROR, chat.log.name):
        answer = await client.post("/v1/chat/completions", json={"n": 1}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500
    (record,) = caplog.records
    assert "mine" in record.getMessage() and record.exc_info is not None and record.exc_info[0] is KeyError
