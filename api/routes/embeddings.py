"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import choices, media_parts, openapi_bodies
from api.generation import Generation, answer
from api.services import Services
from app.errors.media import MediaRefused
from app.errors.requests import InvalidRequest
from app.roles import Does

router = APIRouter(tags=["OpenAI"])

BODY = {
    "model": openapi_bodies.MODEL,
    "input": openapi_bodies.INPUTS,
    "encoding_format": {"enum": ["float", "base64", "bytes", "bytes_only"]},
    "dimensions": openapi_bodies.COUNT,
    "user": openapi_bodies.TEXT,
}


#: With `bytes` an entry of some hundred bytes for each input is in one header, which clients and proxies limit.
MOST_IN_A_HEADER = 64


class Embedding(Generation):
    """Vectors of one input or several."""

    streams = False

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        services.serving.check_does(Does.EMBED)
        checked = _checked(body, services.settings.api.max_embedding_inputs)
        return await services.serving.embed(services.serving.embedding_request(checked, request_id))


def _checked(body: dict[str, Any], most: int) -> dict[str, Any]:
    """What vLLM's model lets pass, or passes over."""
    if body.get("normalize") is not None:
        raise InvalidRequest("normalize is not known: say use_activation", param="normalize")
    if body.get("padding") not in (None, False, "do_not_pad"):
        # Made of tokens that count as any others, and of as many as the model takes, for each word of the body.
        raise InvalidRequest("inputs are not padded", param="padding")
    for path, _ in media_parts.CHAT.parts(body):
        raise MediaRefused("only text is embedded here", param=path)
    if "messages" in body:
        return body
    given = body.get("input")
    if given is None:
        raise InvalidRequest("the input is missing", param="input")
    if given in ("", []):
        raise InvalidRequest("the input is empty", param="input")
    inputs = choices.prompts(given)
    if inputs > most:
        raise InvalidRequest(f"more than {most} inputs in one request (api.max_embedding_inputs)", param="input")
    if body.get("encoding_format") == "bytes" and inputs > MOST_IN_A_HEADER:
        raise InvalidRequest(f"more than {MOST_IN_A_HEADER} inputs: say bytes_only", param="encoding_format")
    return body


@router.post("/v1/embeddings", openapi_extra=openapi_bodies.operation(BODY), response_model=None)
async def embeddings(request: Request) -> Response:
    """OpenAI's embeddings of a text, of several, or of token ids, where the served model makes embeddings.

    `messages` in the place of `input` is a conversation in the model's chat template, and one vector. `dimensions` are
    for models that were made for them.
    """
    return await answer(request, Embedding())
