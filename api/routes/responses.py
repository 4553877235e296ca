"""POST /v1/responses, and what asks for a stored response."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import media_parts, openapi_bodies, response_history
from api.generation import Frame, Generation, answer
from api.services import Services
from api.vllm_serving import response_events
from app.errors import Failure, InvalidRequest, ResponseNotFound

router = APIRouter(tags=["OpenAI"])

BODY = {
    "model": openapi_bodies.MODEL,
    "input": openapi_bodies.PARTS,
    "instructions": openapi_bodies.TEXT,
    "max_output_tokens": openapi_bodies.COUNT,
    "tools": openapi_bodies.OBJECTS,
    "tool_choice": {"oneOf": [openapi_bodies.TEXT, openapi_bodies.OBJECT]},
    "text": openapi_bodies.OBJECT,
    "reasoning": openapi_bodies.OBJECT,
    "metadata": {"type": "object", "additionalProperties": openapi_bodies.TEXT},
    "store": openapi_bodies.FLAG,
    **openapi_bodies.SAMPLING,
}


class ResponseGeneration(Generation):
    """A response; as a stream, typed events without `[DONE]`."""

    shape = media_parts.RESPONSES

    def __init__(self) -> None:
        self._events = response_events()

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        if body.get("background"):
            raise InvalidRequest("responses are not stored here, so none runs in the background", param="background")
        if previous := body.get("previous_response_id"):
            raise _unknown(str(previous), "previous_response_id")
        found = await services.serving.responses(
            services.serving.responses_request(response_history.readable(body), request_id)
        )
        return self._events.frames(found) if isinstance(found, AsyncGenerator) else found

    def whole(self, answer: Any) -> str | bytes:
        return str(answer.model_dump_json(by_alias=True))

    def error_in(self, frame: Frame) -> dict[str, Any] | None:
        return None  # vLLM raises here

    def failed(self, failure: Failure) -> str:
        return str(self._events.failed(failure))


@router.post("/v1/responses", openapi_extra=openapi_bodies.operation(BODY, "input", streams=True), response_model=None)
async def create_response(request: Request) -> Response:
    """OpenAI's responses, streamed or whole.

    Nothing is stored: `store` may be true, as it is when clients say nothing, and changes nothing.
    `previous_response_id` gets 404, `background` 400: send the conversation as `input`. Images come as `input_image`
    with a `data:` URL.
    """
    return await answer(request, ResponseGeneration())


@router.get("/v1/responses/{response_id}", openapi_extra={"responses": openapi_bodies.answers()}, response_model=None)
async def get_response(response_id: str) -> Response:
    """404: no response is stored."""
    _refuse(response_id)


@router.delete(
    "/v1/responses/{response_id}", openapi_extra={"responses": openapi_bodies.answers()}, response_model=None
)
async def delete_response(response_id: str) -> Response:
    """404: no response is stored."""
    _refuse(response_id)


@router.post(
    "/v1/responses/{response_id}/cancel", openapi_extra={"responses": openapi_bodies.answers()}, response_model=None
)
async def cancel_response(response_id: str) -> Response:
    """404: none runs in the background. A client cancels its response by closing the connection."""
    _refuse(response_id)


def _refuse(response_id: str) -> NoReturn:
    raise _unknown(response_id, "response_id")


def _unknown(response_id: str, param: str) -> ResponseNotFound:
    return ResponseNotFound(f"there is no response {response_id[:100]!r}: this server stores none", param=param)
