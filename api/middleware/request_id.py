"""Every request has an id, and every answer says it."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import anthropic_errors
from api.middleware import straight

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class RequestId:
    """Takes the client's `X-Request-Id` if it is sane, makes one otherwise, and sends it back.

    It is in `scope["state"]["request_id"]`. Anthropic's clients look for it in the header `request-id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        straight.lay(scope, send)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if anthropic_errors.wanted(scope["path"]):
                    headers["request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        finally:
            straight.close(scope)
