"""Comments in streams that are silent for long, so that no proxy in between takes them for dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.middleware import straight

log = logging.getLogger(__name__)

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
#: Ends of a line and of the empty line after it. A lone CR could still become a CR LF.
EVENT_ENDS = (b"\n\n", b"\n\r\n")
#: Shorter sleeps may end before the clock has moved.
RESOLUTION_S = 0.001


class KeepAlive:
    """Sends a comment when a `text/event-stream` has been silent for `interval_s` seconds between two events."""

    def __init__(self, app: ASGIApp, interval_s: float) -> None:
        self._app = app
        self._interval_s = interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        stream: _Stream | None = None

        async def watched(message: Message) -> None:
            nonlocal stream
            if stream is not None:
                return await stream.send(message)
            await send(message)
            if message["type"] == "http.response.start" and _is_event_stream(message.get("headers", [])):
                stream = _Stream(straight.way(scope, send), self._interval_s)
                straight.lay(scope, stream.send)

        try:
            await self._app(scope, receive, watched)
        finally:
            if stream is not None:
                await stream.close()


class _Stream:
    """One response. Its own messages and the comments take turns."""

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._tail = b""
        self._ended = False
        self._sending = False
        self._pinging: asyncio.Future[None] | None = None
        self._comment: asyncio.Task[None] | None = None
        self._look_after(interval_s)

    async def send(self, message: Message) -> None:
        """Runs for every token."""
        if self._pinging is not None:
            await self._pinging
        body = message.get("body", b"")
        if body:
            self._tail = body[-len(DONE) :] if len(body) >= len(DONE) else (self._tail + body)[-len(DONE) :]
        if not message.get("more_body", False) or self._tail == DONE:
            self._ended = True
        self._sending = True
        try:
            await self._send(message)
        finally:
            self._sending = False
            self._last = self._loop.time()

    async def close(self) -> None:
        self._ended = True
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)

    def _look(self) -> None:
        """Whenever the stream may have been silent for long enough. A task that sleeps would cost more than a timer."""
        if self._ended:
            return
        silent = self._loop.time() - self._last
        if silent >= self._interval_s:
            self._last, silent = self._loop.time(), 0.0
            if not self._sending and (not self._tail or self._tail.endswith(EVENT_ENDS)):
                self._pinging = self._loop.create_future()  # from now on the stream's own messages wait
                self._comment = asyncio.create_task(self._ping(self._pinging))
                return
        self._look_after(self._interval_s - silent)

    def _look_after(self, seconds: float) -> None:
        self._timer = self._loop.call_later(max(seconds, RESOLUTION_S), self._look)

    async def _ping(self, sent: asyncio.Future[None]) -> None:
        try:
            await self._send({"type": "http.response.body", "body": PING, "more_body": True})
        except OSError as error:
            log.debug("the client has gone: %s", error)  # the stream's own next message says so, too
            self._ended = True
        except Exception:
            log.exception("no more comments in this stream")
            self._ended = True
        finally:
            if not sent.done():  # as it is when who waited was cancelled
                sent.set_result(None)
            self._pinging = None
        # Not before what waited for this comment has been sent, however long that took.
        self._last = self._loop.time()
        self._look_after(self._interval_s)


def _is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """And one into which something can be put: not compressed, and of no declared length."""
    found = {name.lower(): value for name, value in headers}
    kind = found.get(b"content-type", b"").lower()
    return kind.startswith(b"text/event-stream") and not found.keys() & {b"content-encoding", b"content-length"}
