"""A request's body, from its first byte on until it is a JSON object."""

from __future__ import annotations

import asyncio
import time

import orjson
from fastapi import Request

from api import inline_media
from api.inline_media import Body
from api.media_parts import Shape
from app.errors.requests import InvalidRequest
from app.errors.serving import DeadlineExceeded


async def json_object(request: Request, deadline: float, shape: Shape) -> Body:
    """The body, whose media have that shape. Raises InvalidRequest, and DeadlineExceeded at `deadline` (unix time)."""
    try:
        async with asyncio.timeout(deadline - time.time()):
            received = await _received(request)
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed before its body had come") from None
    try:
        body = inline_media.parse(received, shape)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from None
    if not isinstance(body.fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


async def _received(request: Request) -> bytearray:
    """All of it. Not by `body()`, which would keep it as long as the request, and for a moment twice."""
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
    return received
