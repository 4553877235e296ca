"""When a component is ready, and when the whole is: not before a request succeeds."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from redis.exceptions import RedisError

from app import api_keys
from app.errors.requests import WrongEndpoint
from app.launch.errors import StartFailed
from app.registry import Registry
from app.roles import Does

POLL_S = 0.3
HTTP_TIMEOUT_S = 5.0
#: The first request compiles and warms up: it may take longer than any other.
FIRST_REQUEST_TIMEOUT_S = 120.0
#: The smallest requests, of which a model answers one.
FIRST_REQUESTS: dict[Does, tuple[str, dict[str, Any]]] = {
    Does.GENERATE: (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    ),
    Does.EMBED: ("/v1/embeddings", {"input": "Hello"}),
}


async def registered(registry: Registry, worker_id: str, pid: int) -> bool:
    """Whether the worker has registered, this process and not an earlier one of its name."""
    try:
        return any(one.id == worker_id and one.pid == pid for one in await registry.workers())
    except (RedisError, OSError):
        return False


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    """Whether GET answers 200."""
    try:
        return (await client.get(url, timeout=HTTP_TIMEOUT_S)).status_code == 200
    except httpx.HTTPError:
        return False


async def first_request(client: httpx.AsyncClient, url: str, model: str, key: str | None) -> Does:
    """Return when the API counts itself ready and a small request has succeeded: what the model does.

    Raises StartFailed for a refusal that asking again will not change.
    """
    headers, left = api_keys.headers(key), list(FIRST_REQUESTS)
    while True:
        if await answers(client, f"{url}/health/ready"):
            endpoint, asked = FIRST_REQUESTS[left[0]]
            body = {"model": model, **asked}
            try:
                answer = await client.post(url + endpoint, json=body, headers=headers, timeout=FIRST_REQUEST_TIMEOUT_S)
            except httpx.HTTPError:
                answer = None
            if answer is not None and answer.status_code == 200:
                return left[0]
            if answer is not None and len(left) > 1 and _of_error(answer, "code") == WrongEndpoint.code:
                del left[0]  # the model does something else
                continue
            if answer is not None and answer.status_code < 500 and answer.status_code != 429:
                raise StartFailed("api", f"a first request was refused ({answer.status_code}): {error_message(answer)}")
        await asyncio.sleep(POLL_S)


def error_message(answer: httpx.Response) -> str:
    """`error.message` of an OpenAI error object, or the beginning of whatever came instead."""
    return _of_error(answer, "message") or answer.text[:300] or answer.reason_phrase


def _of_error(answer: httpx.Response, field: str) -> str:
    """A field of an OpenAI error object; "" where there is none."""
    try:
        content: Any = answer.json()
        return str(content["error"][field])
    except (ValueError, KeyError, TypeError):
        return ""
