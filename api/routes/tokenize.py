"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import media_parts, openapi_bodies
from api.generation import Generation, answer
from api.services import Services
from app.errors import MediaRefused

router = APIRouter(tags=["vLLM"])

TOKENIZE = {
    "model": openapi_bodies.MODEL,
    "prompt": openapi_bodies.TEXT,
    "messages": openapi_bodies.MESSAGES,
    "add_special_tokens": openapi_bodies.FLAG,
    "return_token_strs": openapi_bodies.FLAG,
}
DETOKENIZE = {"model": openapi_bodies.MODEL, "tokens": openapi_bodies.TOKENS}


class Tokens(Generation):
    """A prompt's tokens."""

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        for path, _ in media_parts.CHAT.parts(body):
            raise MediaRefused("only text is tokenized here: what a medium becomes, a worker has to say", param=path)
        return await services.serving.tokenize(body)


class Text(Generation):
    """What tokens say."""

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        return await services.serving.detokenize(body)


@router.post("/tokenize", openapi_extra=openapi_bodies.operation(TOKENIZE), response_model=None)
async def tokenize(request: Request) -> Response:
    """The token ids of a `prompt`, or of `messages` in the model's chat template, as vLLM answers. Text only."""
    return await answer(request, Tokens())


@router.post("/detokenize", openapi_extra=openapi_bodies.operation(DETOKENIZE, "tokens"), response_model=None)
async def detokenize(request: Request) -> Response:
    """The text of `tokens`."""
    return await answer(request, Text())
