"""The cheapest HTTP client that notices tokens: on shared cores, what the client burns is missing elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, first_token: Callable[[], None], done: asyncio.Future[None]) -> None:
        self._request = request
        self._first_token: Callable[[], None] | None = first_token
        self._done = done
        self._tail = b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self._first_token is not None and b'"content":"' in data:
            # The first frame carries the role and an empty content, and comes with the first token.
            self._first_token()
            self._first_token = None
        self._tail = (self._tail + data)[-64:]
        if b"[DONE]" in self._tail and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the stream broke: {exc}, last {self._tail!r}"))


async def chat(host: str, port: int, body: dict[str, object], first_token: Callable[[], None]) -> None:
    """One streamed chat completion on a connection of its own. ConnectionError if it does not end as it should."""
    content = orjson.dumps(body)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    transport, _ = await loop.create_connection(lambda: _Stream(head.encode() + content, first_token, done), host, port)
    try:
        await asyncio.wait_for(done, 300)
    finally:
        transport.close()
