"""What the openai client tries again, counted by the servers themselves.

FULL_URL names a server that serves one request at a time, NO_WORKER_URL one that has no workers.
"""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

QUESTION: list[Any] = [{"role": "user", "content": "What is in the garden?"}]


class Counted:
    """A client, and the server's count of its requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=2)

    def count(self, outcome: str) -> int:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as answer:
            found = re.search(rf'^trivet_requests_total{{outcome="{outcome}"}} (\S+)', answer.read().decode(), re.M)
        return int(float(found[1])) if found else 0


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Iterator[Counted]:
    made = Counted(os.environ[request.param])
    with made.client:
        yield made


full = pytest.mark.parametrize("counted", ["FULL_URL"], indirect=True)
no_worker = pytest.mark.parametrize("counted", ["NO_WORKER_URL"], indirect=True)


@pytest.fixture
def ask(model_name: str) -> dict[str, Any]:
    return {"model": model_name, "messages": QUESTION, "max_tokens": 4}


@full
def test_a_wrong_request_is_not_sent_again(counted: Counted, ask: dict[str, Any]) -> None:
    before = counted.count("invalid_request")
    with pytest.raises(openai.BadRequestError):
        counted.client.chat.completions.create(**ask | {"temperature": -1})
    assert counted.count("invalid_request") == before + 1


@full
def test_a_request_whose_deadline_passed_is_not_sent_again(counted: Counted, ask: dict[str, Any]) -> None:
    before = counted.count("deadline_exceeded")
    long: dict[str, Any] = ask | {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.InternalServerError) as late:
        counted.client.chat.completions.create(**long, extra_headers={"X-Request-Timeout": "0.3"})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    assert counted.count("deadline_exceeded") == before + 1


@full
def test_a_full_server_is_asked_again(counted: Counted, ask: dict[str, Any]) -> None:
    before = counted.count("rate_limit_exceeded")
    long: dict[str, Any] = ask | {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with counted.client.chat.completions.create(**long, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            counted.client.with_options(max_retries=0).chat.completions.create(**ask)
        assert refused.value.response.headers["retry-after"] == "1"
        assert counted.count("rate_limit_exceeded") == before + 1
        leave = threading.Timer(0.5, stream.close)
        leave.start()
        answer = counted.client.with_options(max_retries=8).chat.completions.create(**ask)
        leave.join()
    assert answer.choices[0].message.content
    assert counted.count("rate_limit_exceeded") > before + 1


@no_worker
def test_a_server_without_workers_is_asked_again_when_it_says(counted: Counted, ask: dict[str, Any]) -> None:
    before, began = counted.count("no_worker"), time.monotonic()
    with pytest.raises(openai.InternalServerError) as refused:
        counted.client.with_options(max_retries=1).chat.completions.create(**ask)
    assert (refused.value.status_code, refused.value.code) == (503, "no_worker")
    assert counted.count("no_worker") == before + 2
    # Of its own accord the client would wait for less than a second.
    assert time.monotonic() - began >= float(refused.value.response.headers["retry-after"]) > 1
