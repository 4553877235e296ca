"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import choices, openapi_bodies
from api.direct_route import DirectRoute
from api.generation import Generation, answer
from api.services import Services
from app.errors.requests import InvalidRequest

router = APIRouter(tags=["OpenAI"], route_class=DirectRoute)

BODY = {
    "model": openapi_bodies.MODEL,
    "prompt": openapi_bodies.INPUTS,
    "max_tokens": {"type": "integer", "minimum": 0},
    "echo": openapi_bodies.FLAG,
    "logprobs": {"type": "integer", "minimum": 0},
    **openapi_bodies.OPENAI_SAMPLING,
}


class Completion(Generation):
    """Completions of one prompt or several."""

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        request = services.serving.completion_request(_checked(body), request_id)
        return await services.serving.completion(request)


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's model lets pass: too many prompts, and `best_of`, of which only the plain value means anything."""
    prompt, best_of = body.get("prompt"), body.get("best_of")
    if prompt is None:
        raise InvalidRequest("the prompt is missing", param="prompt")
    if choices.prompts(prompt) > choices.MAX_CHOICES:
        raise InvalidRequest(f"more than {choices.MAX_CHOICES} prompts in one request", param="prompt")
    if best_of is not None and best_of != body.get("n", 1):
        raise InvalidRequest("best_of is not supported, unless it equals n", param="best_of")
    return body


@router.post(
    "/v1/completions", openapi_extra=openapi_bodies.operation(BODY, "prompt", streams=True), response_model=None
)
async def completions(request: Request) -> Response:
    """OpenAI's completions of a prompt, of several, or of token ids, streamed or whole.

    Choice `i` of prompt `p` has the index `p * n + i`. `best_of` is taken when it equals `n`.
    """
    return await answer(request, Completion())
