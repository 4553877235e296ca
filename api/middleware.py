"""Pure ASGI middleware: what holds for every request, streams included."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors
from app.errors import BodyTooLarge, BodyTooSlow

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
#: Longest wait for the next piece of a body.
BODY_SILENCE_S = 30.0
#: Of a declared length: more are no size, and Python refuses to read thousands.
MAX_DIGITS = 18


class RequestId:
    """Takes the client's `X-Request-Id` if it is sane, makes one otherwise, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, with_id)


class BodyLimit:
    """Stops reading a body at its limit, or when nothing of it comes for a while.

    The declared length is only a reason to refuse sooner.
    """

    def __init__(self, app: ASGIApp, max_bytes: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limit = self._max_bytes()
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and (len(declared) > MAX_DIGITS or int(declared) > limit):
            return await _refuse(limit)(scope, receive, send)
        read, whole = 0, False

        async def limited() -> Message:
            nonlocal read, whole
            message = await receive() if whole else await _soon(receive)
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > limit:
                raise BodyTooLarge(_reason(limit))
            return message

        await self._app(scope, limited, send)


async def _soon(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(BODY_SILENCE_S):
            return await receive()
    except TimeoutError:
        raise BodyTooSlow(f"nothing of the body came for {BODY_SILENCE_S:.0f} s") from None


def _reason(limit: int) -> str:
    return f"the body is larger than api.max_body_mb allows ({limit / 1e6:g} MB)"


def _refuse(limit: int) -> ASGIApp:
    answer = errors.response(BodyTooLarge(_reason(limit)).failure())
    answer.headers["Connection"] = "close"
    return answer
