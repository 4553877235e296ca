"""The way of an answer in events to its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.admission import Ticket
from api.context import RequestContext
from api.disconnect import WhileConnected
from api.ending import to_the_end
from api.middleware import straight

#: Proxies must not hold tokens back.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

#: vLLM's frames are text, those of the fast lane are bytes already.
Frame = str | bytes
Frames = AsyncGenerator[Frame, None]


class Stream(StreamingResponse):
    """An answer in events. Whichever way it ends, nothing of the request goes on: a generator that was never begun,
    since the client left before, ends nothing by itself."""

    def __init__(
        self,
        frames: Frames,
        begun: asyncio.Task[Any],
        asked: RequestContext,
        ticket: Ticket,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        told = frames if asked.timings is None else asked.timings.told(frames)
        super().__init__(told, headers={**HEADERS, **headers}, media_type="text/event-stream")
        self._begun, self._asked, self._ticket = begun, asked, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with WhileConnected(receive) as client:
                await self._send_all(scope, send, client)
        finally:
            self._ticket.close("cancelled")
            if not _is_over(self._begun, self._asked):
                await to_the_end(_abandon(self._begun, self._asked))

    async def _send_all(self, scope: Scope, send: Send, client: WhileConnected) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send = straight.way(scope, send)
        async for frame in self.body_iterator:
            body = frame.encode() if isinstance(frame, str) else frame
            await send({"type": "http.response.body", "body": body, "more_body": True})
            if client.left:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_over(begun: asyncio.Task[Any], asked: RequestContext) -> bool:
    """As after a stream that was read to its end."""
    return begun.done() and (begun.cancelled() or begun.exception() is None) and not asked.on_close


async def _abandon(begun: asyncio.Task[Any], asked: RequestContext) -> None:
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    await asked.close()
