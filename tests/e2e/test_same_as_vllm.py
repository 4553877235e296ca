"""Answers through the pipeline are those of `vllm serve`, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx
import pytest

from tests.e2e import differences, sse
from tests.e2e.stack import MODEL, Stack
from tests.e2e.varied_requests import CHAT, COMPLETIONS, REQUESTS, Ask
from tests.e2e.vllm_server import Server

#: Requests at once: as many as share an engine's steps well, and as many as a test may wait for on a slow machine.
AT_ONCE = 8

Answers = dict[str, Any]


def answer(url: str, ask: Ask) -> Any:
    """As a client understands it: a stream put together."""
    found = httpx.post(f"{url}{ask.path}", json={"model": MODEL, **ask.body}, timeout=240)
    assert found.status_code == 200, found.text
    if not ask.body.get("stream"):
        return json.loads(found.text)
    if ask.path in (CHAT, COMPLETIONS):
        return sse.whole(sse.chunks(found.text))
    return sse.merged(sse.events(found.text))


@pytest.fixture(scope="session")
def answers() -> Callable[[str], Answers]:
    """A server's answers to all requests, asked for once."""

    @cache
    def asked(url: str) -> Answers:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(REQUESTS, pool.map(lambda ask: answer(url, ask), REQUESTS.values()), strict=True))

    return asked


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field(stack: Stack, vllm_server: Server, answers: Callable[[str], Answers], name: str) -> None:
    ours, theirs = answers(stack.base_url)[name], answers(vllm_server.url)[name]
    assert list(differences.found(ours, theirs)) == []


def test_requests_are_varied_and_say_something(vllm_server: Server, answers: Callable[[str], Answers]) -> None:
    """Where all answers were empty, or alike, comparing them would show nothing."""
    told = {json.dumps(_text(one)) for name, one in answers(vllm_server.url).items() if REQUESTS[name].path == CHAT}
    assert len(REQUESTS) >= 50 and len(told) > 30


def _text(one: Any) -> list[Any]:
    return [(choice["message"].get("content"), choice["finish_reason"]) for choice in one["choices"]]
