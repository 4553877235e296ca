"""What nobody foresaw is an answer like any other."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors

log = logging.getLogger(__name__)


class LastResort:
    """Answers 500 for an exception that no handler knows.

    Starlette would do so too, but outside of all middleware: without a request id, and unreadable for a web page.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if started:
                raise  # the server closes the connection, and so the client sees that something is missing
            log.exception("unexpected error in request %s", scope["state"].get("request_id", ""), exc_info=error)
            await errors.response(errors.UNEXPECTED, scope["path"])(scope, receive, send)
