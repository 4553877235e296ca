"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import media_parts, openapi_bodies
from api.generation import Generation, answer
from api.services import Services
from app.errors.media import MediaRefused
from app.errors.requests import InvalidRequest

router = APIRouter(tags=["vLLM"])

TOKENIZE = {
    "model": openapi_bodies.MODEL,
    "prompt": openapi_bodies.TEXT,
    "messages": openapi_bodies.MESSAGES,
    "add_special_tokens": openapi_bodies.FLAG,
    "return_token_strs": openapi_bodies.FLAG,
}
DETOKENIZE = {"model": openapi_bodies.MODEL, "tokens": openapi_bodies.TOKENS}
#: Longer text, on average, does not fit the model's context. A tokenizer takes about a second for a million characters.
MAX_CHARS_PER_TOKEN = 8


class Tokens(Generation):
    """A prompt's tokens."""

    streams = False

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        for path, _ in media_parts.CHAT.parts(body):
            raise MediaRefused("only text is tokenized here: what a medium becomes, a worker has to say", param=path)
        limit = MAX_CHARS_PER_TOKEN * services.serving.max_model_len
        param = "messages" if "messages" in body else "prompt"
        if sum(map(len, _texts(list(body.values()) if param == "messages" else body.get(param)))) > limit:
            raise InvalidRequest(f"more than {limit} characters in one request", param=param)
        return await services.serving.tokenize(body)


class Text(Generation):
    """What tokens say."""

    streams = False

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        tokens, limit = body.get("tokens"), services.serving.max_model_len
        if isinstance(tokens, list) and len(tokens) > limit:
            raise InvalidRequest(f"more than {limit} tokens, the model's context, in one request", param="tokens")
        return await services.serving.detokenize(body)


def _texts(given: Any) -> Iterator[str]:
    """All text in it: templates write tools, and whatever else they are given, into the prompt."""
    waiting: list[Any] = [given]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            waiting += [*found, *found.values()]
        elif isinstance(found, list):
            waiting += found


@router.post("/tokenize", openapi_extra=openapi_bodies.operation(TOKENIZE), response_model=None)
async def tokenize(request: Request) -> Response:
    """The token ids of a `prompt`, or of `messages` in the model's chat template, as vLLM answers. Text only."""
    return await answer(request, Tokens())


@router.post("/detokenize", openapi_extra=openapi_bodies.operation(DETOKENIZE, "tokens"), response_model=None)
async def detokenize(request: Request) -> Response:
    """The text of `tokens`."""
    return await answer(request, Text())
