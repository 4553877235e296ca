"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import errors, media_parts, openapi_bodies
from api.direct_route import DirectRoute
from api.generation import Generation, answer
from api.services import Services
from app.errors.base import Failure

router = APIRouter(tags=["Anthropic"], route_class=DirectRoute)

PROMPT = {
    "model": openapi_bodies.TEXT,
    "messages": openapi_bodies.MESSAGES,
    "system": openapi_bodies.PARTS,
    "tools": openapi_bodies.OBJECTS,
    "tool_choice": openapi_bodies.OBJECT,
    "thinking": openapi_bodies.OBJECT,
}
BODY = {
    **PROMPT,
    "max_tokens": openapi_bodies.COUNT,
    "stop_sequences": {"type": "array", "items": openapi_bodies.TEXT},
    "top_k": {"type": "integer"},
    "metadata": openapi_bodies.OBJECT,
    **openapi_bodies.SAMPLING,
}


class Message(Generation):
    """A message; as a stream, Anthropic's events."""

    shape = media_parts.MESSAGES
    error_head = "event: error"

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        return await services.serving.messages(services.serving.messages_request(body))

    def whole(self, answer: Any) -> str | bytes:
        return str(answer.model_dump_json(exclude_none=True))

    def failed(self, failure: Failure) -> str:
        return errors.anthropic_frame(failure)


class Count(Message):
    """The number of a message's tokens."""

    streams = False

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        return await services.serving.count_tokens(services.serving.messages_request(body, count=True))


@router.post(
    "/v1/messages",
    openapi_extra=openapi_bodies.operation(BODY, "model", "messages", "max_tokens", streams=True, anthropic=True),
    response_model=None,
)
async def create_message(request: Request) -> Response:
    """Anthropic's messages, streamed or whole. Images come as sources of base64 or a URL, and errors in Anthropic's
    shape."""
    return await answer(request, Message())


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=openapi_bodies.operation(PROMPT, "model", "messages", anthropic=True),
    response_model=None,
)
async def count_tokens(request: Request) -> Response:
    """How many tokens the messages are, as `usage` would say. With images it costs a worker the prompt's prefill."""
    return await answer(request, Count())
