"""api.routes.embeddings: what is let through to the serving code, and that its response is the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi.responses import Response

from api.intake import Intake
from api.routes import embeddings
from app.errors.requests import WrongEndpoint
from app.roles import Does
from app.settings import Settings
from tests.route_client import route_client

PATH = "/v1/embeddings"


class Serving:
    """Answers with what it was asked."""

    def __init__(self) -> None:
        self.does = Does.EMBED

    def check_does(self, does: Does) -> None:
        if does is not self.does:
            raise WrongEndpoint("it does not")

    def embedding_request(self, body: dict[str, Any], request_id: str) -> Any:
        return {"id": request_id, **body}

    async def embed(self, request: Any) -> Response:
        return Response(json.dumps(request), 200, {"metadata": "of vLLM"}, media_type="application/octet-stream")


@pytest.fixture
def services() -> Any:
    chosen = Settings()
    adapters = SimpleNamespace(enter=AsyncMock())
    return SimpleNamespace(
        settings=chosen, in_flight=0, intake=Intake(chosen, None), serving=Serving(), adapters=adapters
    )


@pytest.fixture
async def client(services: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with route_client(embeddings.router, services) as made:
        yield made
    assert services.in_flight == 0


async def test_the_response_is_the_serving_codes_own(client: httpx.AsyncClient) -> None:
    found = await client.post(PATH, json={"input": "hi", "user": None}, headers={"X-Request-Id": "mine"})
    assert found.json() == {"id": "mine", "input": "hi"}, "null is the default"
    assert (found.headers["metadata"], found.headers["content-type"]) == ("of vLLM", "application/octet-stream")


@pytest.mark.parametrize("given", ["hi", ["hi", "you"], [5] * 5000, [[5], [6]], [""]])
async def test_what_may_be_embedded_goes_on(client: httpx.AsyncClient, given: Any) -> None:
    assert (await client.post(PATH, json={"input": given})).json()["input"] == given


@pytest.mark.parametrize("given", ["", [], None])
async def test_nothing_is_no_input(client: httpx.AsyncClient, given: Any) -> None:
    found = await client.post(PATH, json={"input": given})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "input")


async def test_the_number_of_inputs_is_limited(client: httpx.AsyncClient, services: Any) -> None:
    services.settings.api.max_embedding_inputs = 2
    assert (await client.post(PATH, json={"input": [[5, 6, 7], [8]]})).status_code == 200
    found = await client.post(PATH, json={"input": [[5], [6], [7]]})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "mess"),
        ({"input": "hi", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"input": "hi", "normalize": True}, "normalize"),
    ],
)
async def test_what_would_be_passed_over_is_refused(client: httpx.AsyncClient, body: Any, param: str) -> None:
    found = await client.post(PATH, json=body)
    assert found.status_code == 400 and found.json()["error"]["param"].startswith(param), found.text


async def test_a_conversation_is_an_input(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert (await client.post(PATH, json={"messages": messages})).json()["messages"] == messages


@pytest.mark.parametrize("body", [{"input": "hi"}, {}])
async def test_a_model_that_writes_has_no_such_endpoint(client: httpx.AsyncClient, services: Any, body: Any) -> None:
    services.serving.does = Does.GENERATE
    found = await client.post(PATH, json=body)
    assert (found.status_code, found.json()["error"]["code"]) == (404, "wrong_endpoint")
