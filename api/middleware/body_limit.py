"""No body is larger, or slower, than the settings allow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors
from app.errors import BodyTooLarge, BodyTooSlow

#: Longest wait for the next piece of a body.
BODY_SILENCE_S = 30.0
#: Of a declared length: more are no size, and Python refuses to read thousands.
MAX_DIGITS = 18


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
            return await _refuse(limit, scope)(scope, receive, send)
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


def _refuse(limit: int, scope: Scope) -> ASGIApp:
    answer = errors.response(BodyTooLarge(_reason(limit)).failure(), scope["path"])
    answer.headers["Connection"] = "close"
    return answer
