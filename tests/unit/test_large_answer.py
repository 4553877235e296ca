"""api.large_answer: what is in memory counts as in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.responses import Response, StreamingResponse

from api import metrics
from api.admission import Ticket
from api.large_answer import LARGE, PIECE, LargeAnswer, is_large
from tests.polling import until

SCOPE = {"type": "http"}
BODY = bytes(range(256)) * (LARGE // 256) + b"the end"


class Client:
    """Takes a message each time that it `reads`, as a connection does whose buffer is full."""

    def __init__(self) -> None:
        self.reads = asyncio.Semaphore(0)
        self.leaves = asyncio.Event()
        self.messages: list[Any] = []

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.acquire()
        self.messages.append(message)

    def read(self, number: int) -> None:
        for _ in range(number):
            self.reads.release()


@pytest.fixture
def services() -> Any:
    return SimpleNamespace(settings=SimpleNamespace(api=SimpleNamespace(max_in_flight=1)), in_flight=0)


def count(outcome: str) -> float:
    value: float = metrics.REQUESTS.labels(outcome)._value.get()
    return value


def answer(services: Any, content: Response | None = None, limit_s: float = 20.0) -> LargeAnswer:
    return LargeAnswer(content or Response(BODY, headers={"x-one": "1"}), time.time() + limit_s, Ticket(services))


def test_what_is_large() -> None:
    assert is_large(Response(BODY)) and is_large(StreamingResponse(iter(())))
    assert not is_large(Response(bytes(LARGE))) and not is_large(Response())


async def test_it_is_in_flight_until_its_client_has_it(services: Any) -> None:
    client, before = Client(), count("ok")
    sending = asyncio.create_task(answer(services)(SCOPE, client.receive, client.send))
    pieces = -(-len(BODY) // PIECE)
    client.read(1 + pieces)
    await until(lambda: len(client.messages) == 1 + pieces, "all but the end")
    assert (services.in_flight, count("ok")) == (1, before)
    client.read(1)
    await sending
    assert (services.in_flight, count("ok")) == (0, before + 1)
    start, *rest = client.messages
    assert (start["status"], dict(start["headers"])[b"x-one"]) == (200, b"1")
    assert int(dict(start["headers"])[b"content-length"]) == len(BODY)
    assert b"".join(one["body"] for one in rest) == BODY
    assert [one["more_body"] for one in rest] == [True] * pieces + [False]


async def test_one_that_comes_in_pieces_already(services: Any) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    client = Client()
    client.read(9)
    await answer(services, StreamingResponse(pieces()))(SCOPE, client.receive, client.send)
    assert [one.get("body") for one in client.messages] == [None, b"a", b"b", b""]
    assert services.in_flight == 0


async def test_a_client_that_leaves_ends_it(services: Any) -> None:
    client, before = Client(), count("cancelled")
    sending = asyncio.create_task(answer(services)(SCOPE, client.receive, client.send))
    client.read(2)
    await until(lambda: len(client.messages) == 2, "it is being sent")
    client.leaves.set()
    await sending
    assert (services.in_flight, count("cancelled")) == (0, before + 1)


async def test_a_client_that_does_not_read_has_until_the_deadline(services: Any) -> None:
    client, before = Client(), count("deadline_exceeded")
    client.read(2)
    await answer(services, limit_s=0.1)(SCOPE, client.receive, client.send)
    assert (services.in_flight, count("deadline_exceeded")) == (0, before + 1)
    assert client.messages[-1]["more_body"], "the answer has no end"
