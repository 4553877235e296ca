"""What the tests of the token stream share: short names for its parts, on a real Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from app import keys
from app.messages.deltas import Batch, Delta
from app.messages.plans import Assignment
from app.streaming import RequestStream, TokenReader, TokenWriter, writer
from tests.messages import AGG

API = "api-1"
REPLAY = 200


def delta(request: str, seq: int, **changes: Any) -> Delta:
    return Delta(request=request, seq=seq, token_ids=[seq], text=f"{seq} ", **changes)


def last(request: str, seq: int) -> Delta:
    return delta(request, seq, finish_reason="stop")


def writer_of(redis: Any, worker: Assignment = AGG, on_gone: Callable[[str], None] | None = None) -> TokenWriter:
    def unexpected(api: str) -> None:
        pytest.fail(f"{api} was taken for gone")

    return TokenWriter(redis, worker.worker, worker.incarnation, REPLAY, on_gone or unexpected)


@asynccontextmanager
async def reading(redis: Any, api: str = API) -> AsyncIterator[TokenReader]:
    reader = TokenReader(redis, api, REPLAY)
    task = asyncio.create_task(reader.run())
    await asyncio.wait_for(reader.subscribed.wait(), 5)
    try:
        yield reader
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def opened(reader: TokenReader, request: str, *workers: Assignment, attempt: int = 0) -> RequestStream:
    return reader.open(request, attempt, frozenset(workers or {AGG}))


async def whole(stream: RequestStream, limit_s: float = 20.0) -> list[Delta]:
    """All deltas up to the last."""
    deltas: list[Delta] = []
    async with asyncio.timeout(limit_s):
        while not deltas or not deltas[-1].final:
            deltas += await stream.get()
    return deltas


def sequence(deltas: list[Delta]) -> list[int]:
    assert deltas[-1].error is None, deltas[-1].error
    return [one.seq for one in deltas]


async def quiet(stream: RequestStream) -> None:
    """Nothing has come that was not read."""
    assert not stream._ready, list(stream._ready)


@asynccontextmanager
async def listening(redis: Any) -> AsyncIterator[list[Batch]]:
    """Every message on the API's channel."""
    batches: list[Batch] = []

    async def listen() -> None:
        while True:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=1.0)
            if message is not None:
                batches.append(msgspec.json.decode(message["data"], type=Batch))

    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(keys.tokens_channel(API))
        await pubsub.get_message(timeout=5.0)
        task = asyncio.create_task(listen())
        yield batches
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def put_unheard(redis: Any, tokens: TokenWriter, *deltas: Delta) -> None:
    """Send one batch that reaches the replay stream but no subscriber."""
    channel = tokens._channels.setdefault(API, writer._Channel())
    channel.number += 1
    batch = Batch(tokens._worker, tokens._incarnation, channel.number, list(deltas))
    await redis.xadd(keys.replay(API), {"batch": msgspec.json.encode(batch)})


async def tick_for_ever(tokens: TokenWriter) -> None:
    while True:
        await tokens.tick()
        await asyncio.sleep(0.05)
