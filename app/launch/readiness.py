"""When a component is ready, and when the whole is: not before a request succeeds."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from redis.exceptions import RedisError

from app import api_keys
from app.launch.errors import StartFailed
from app.registry import Registry

POLL_S = 0.3
HTTP_TIMEOUT_S = 5.0
#: The first request compiles and warms up: it may take longer than any other.
FIRST_REQUEST_TIMEOUT_S = 120.0


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


async def first_request(client: httpx.AsyncClient, url: str, model: str, key: str | None) -> None:
    """Return when the API counts itself ready and a request of one token has succeeded.

    Raises StartFailed for a refusal that asking again will not change.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    endpoint, headers = f"{url}/v1/chat/completions", api_keys.headers(key)
    while True:
        if await answers(client, f"{url}/health/ready"):
            try:
                answer = await client.post(endpoint, json=body, headers=headers, timeout=FIRST_REQUEST_TIMEOUT_S)
            except httpx.HTTPError:
                answer = None
            if answer is not None and answer.status_code == 200:
                return
            if answer is not None and answer.status_code < 500 and answer.status_code != 429:
                raise StartFailed("api", f"a first request was refused ({answer.status_code}): {error_message(answer)}")
        await asyncio.sleep(POLL_S)


def error_message(answer: httpx.Response) -> str:
    """`error.message` of an OpenAI error object, or the beginning of whatever came instead."""
    try:
        content: Any = answer.json()
        return str(content["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300] or answer.reason_phrase
