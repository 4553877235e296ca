"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import media_parts, openapi_bodies
from api.direct_route import DirectRoute
from api.generation import Generation, answer
from api.services import Services

router = APIRouter(tags=["OpenAI"], route_class=DirectRoute)

BODY = {
    "model": openapi_bodies.MODEL,
    "messages": openapi_bodies.MESSAGES,
    "max_completion_tokens": openapi_bodies.COUNT,
    "max_tokens": openapi_bodies.COUNT,
    "logprobs": openapi_bodies.FLAG,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "tools": openapi_bodies.OBJECTS,
    "tool_choice": {"oneOf": [openapi_bodies.TEXT, openapi_bodies.OBJECT]},
    "parallel_tool_calls": openapi_bodies.FLAG,
    "response_format": openapi_bodies.OBJECT,
    **openapi_bodies.OPENAI_SAMPLING,
}


class Chat(Generation):
    """A chat completion."""

    shape = media_parts.CHAT

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        return await services.serving.chat(services.serving.chat_request(body, request_id))


@router.post(
    "/v1/chat/completions", openapi_extra=openapi_bodies.operation(BODY, "messages", streams=True), response_model=None
)
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions, for text, images, videos and audio, streamed or whole.

    Errors are OpenAI's error object. The header `X-Request-Timeout` (seconds) shortens the server's deadline.
    Reasoning is in `reasoning`, beside `content`. `service_tier` comes back as asked for, `auto` as `default`.
    """
    return await answer(request, Chat())
