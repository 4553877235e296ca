"""The cheapest HTTP client that notices tokens: on shared cores, what the client burns is missing elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson

LIMIT_S = 300.0


class Connection(asyncio.Protocol):
    """One connection, kept alive as real clients keep theirs. One request at a time."""

    def __init__(self) -> None:
        self._first_token: Callable[[], None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._tail = b""
        self._transport: asyncio.WriteTransport | None = None
        self.events = 0

    async def chat(self, body: dict[str, object], first_token: Callable[[], None]) -> None:
        """One streamed chat completion. ConnectionError if it does not end as it should."""
        content = orjson.dumps(body)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self._first_token, self._tail = first_token, b""
        self._done = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(head.encode() + content)
        await asyncio.wait_for(self._done, LIMIT_S)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(f"refused: {data[:1000]!r}")
            return
        self.events += data.count(b"data: ")
        if self._first_token is not None and b'"content":"' in data:
            # The first frame carries the role and an empty content, and comes with the first token.
            self._first_token()
            self._first_token = None
        self._tail = (self._tail + data)[-64:]
        # The last chunk of the body, which is empty, frees the connection.
        if self._tail.endswith(b"[DONE]\n\n\r\n0\r\n\r\n") and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the stream broke: {exc}, last {self._tail!r}")

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(why))

    @property
    def open(self) -> bool:
        """Whether the server, which closes idle connections, has left this one."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Pool:
    """As many connections as requests are in flight. `events` are those of all answers that ended."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._idle: list[Connection] = []
        self.events = 0

    async def chat(self, body: dict[str, object], first_token: Callable[[], None]) -> None:
        self._idle = [one for one in self._idle if one.open]
        if self._idle:
            connection = self._idle.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, *self._address)
        try:
            await connection.chat(body, first_token)
        except BaseException:
            connection.close()
            raise
        self.events, connection.events = self.events + connection.events, 0
        self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
