"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import media_parts, openapi_bodies, response_history
from api.context import RequestContext
from api.direct_route import DirectRoute
from api.event_stream import Frame
from api.generation import Generation, answer
from api.inline_media import Body
from api.intake import Admission
from api.services import Services
from api.stored import items, run, turn
from api.vllm_serving import response_events, response_states
from app.errors.base import Failure
from app.errors.media import MediaUuidNotFound

router = APIRouter(tags=["OpenAI"], route_class=DirectRoute)

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
    "background": openapi_bodies.FLAG,
    "previous_response_id": openapi_bodies.TEXT,
    **openapi_bodies.SAMPLING,
}
#: What vLLM is not told: it would look for the response in its own memory, and run the other by itself.
OURS = ("previous_response_id", "background", "store")


class ResponseGeneration(Generation):
    """A response; as a stream, typed events without `[DONE]`."""

    shape = media_parts.RESPONSES

    def __init__(self) -> None:
        self._turn: turn.Turn | None = None
        self._id = ""
        self._events = response_events()

    async def admit(self, services: Services, body: Body, asked: RequestContext) -> Admission:
        self._id = asked.request_id
        self._turn = await turn.begin(services.store, asked.tenant, body.fields)
        if self._turn is None:
            return await super().admit(services, body, asked)
        self._id = self._turn.named(asked.request_id)
        self._events = response_events(self._turn.told, self._turn.ended)
        self._turn.note(body.fields, self._id)
        try:
            return await services.intake.admit(body.fields, self._turn.shape(body.shape), asked.tenant)
        except MediaUuidNotFound as error:
            if error.param != turn.PREVIOUS:
                raise
            raise MediaUuidNotFound(
                "an image of the conversation is no longer there, or came under another cache_salt: send the "
                "conversation as input",
                param=turn.PREVIOUS,
            ) from error

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        body = {name: value for name, value in body.items() if name not in OURS}
        request = services.serving.responses_request(response_history.readable(body), self._id)
        this = self._turn
        if this is None:
            found = await services.serving.responses(request)
            return self._events.frames(found) if isinstance(found, AsyncGenerator) else found
        if this.previous or this.background:
            # Once more, since errors were to name the client's own fields.
            talk = {**body, "input": this.previous + items.of(body["input"])}
            whole = response_history.readable({**talk, "stream": True} if this.background else talk)
            request = services.serving.responses_request(whole, self._id)
        found = await services.serving.responses(request)
        if this.background:
            return await run.queue(this, response_states(found))
        if isinstance(found, AsyncGenerator):
            return self._events.frames(found)
        return await this.ended(orjson.loads(super().whole(found)))

    def whole(self, answer: Any) -> str | bytes:
        return orjson.dumps(answer) if isinstance(answer, dict) else str(answer.model_dump_json(by_alias=True))

    def error_in(self, frame: Frame) -> dict[str, Any] | None:
        return None  # vLLM raises here

    def failed(self, failure: Failure) -> str:
        return str(self._events.failed(failure))


@router.post("/v1/responses", openapi_extra=openapi_bodies.operation(BODY, "input", streams=True), response_model=None)
async def create_response(request: Request) -> Response:
    """OpenAI's responses, streamed or whole. Images come as `input_image` with a URL.

    Where `api.response_store_ttl_s` is set, they are stored unless `store` is false: `previous_response_id` goes on
    with one, and `background` answers at once with one that is yet to be made. Otherwise `store` changes nothing,
    `previous_response_id` gets 404, `background` 400: send the conversation as `input`.
    """
    return await answer(request, ResponseGeneration())
