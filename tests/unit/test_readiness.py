"""app.launch.readiness: a first request of the kind that the model answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from app.launch import readiness
from app.launch.errors import StartFailed
from app.roles import Does

Asked = list[tuple[str, dict[str, object]]]


def refused(status: int, code: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": "no", "code": code}})


async def ask(posted: Callable[[str], httpx.Response]) -> tuple[Does, Asked]:
    """What the model does, and what is posted until the first success."""
    asked: Asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={})
        asked.append((request.url.path, json.loads(request.content)))
        return posted(request.url.path)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        return await readiness.first_request(client, "http://api", "m", None), asked


async def test_a_model_that_writes_is_asked_for_a_token() -> None:
    does, ((path, body),) = await ask(lambda _: httpx.Response(200, json={}))
    assert does is Does.GENERATE
    assert (path, body["model"], body["max_tokens"]) == ("/v1/chat/completions", "m", 1)


async def test_a_model_that_embeds_is_asked_for_a_vector() -> None:
    chat = "/v1/chat/completions"
    does, found = await ask(
        lambda path: refused(404, "wrong_endpoint") if path == chat else httpx.Response(200, json={})
    )
    assert does is Does.EMBED
    assert [path for path, _ in found] == [chat, "/v1/embeddings"]
    assert found[1][1] == {"model": "m", "input": "Hello"}


@pytest.mark.parametrize("code", ["model_not_found", "wrong_endpoint"])
async def test_another_refusal_is_told(code: str) -> None:
    with pytest.raises(StartFailed, match="404.*no"):
        await ask(lambda _: refused(404, code))
