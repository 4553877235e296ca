"""What `/openapi.json` says of bodies that routes read themselves: less than vLLM's models, which check them."""

from __future__ import annotations

from typing import Any

from api import choices

TEXT = {"type": "string"}
NUMBER = {"type": "number"}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 1}
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
INPUTS = {
    "oneOf": [
        TEXT,
        {"type": "array", "items": TEXT, "minItems": 1},
        TOKENS,
        {"type": "array", "items": TOKENS, "minItems": 1},
    ]
}
OBJECT = {"type": "object"}
OBJECTS = {"type": "array", "items": OBJECT}
PARTS = {"oneOf": [TEXT, OBJECTS]}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "required": ["role"], "properties": {"role": TEXT, "content": PARTS}},
}
MODEL = {**TEXT, "description": "The served name; the only model when not given."}
SAMPLING = {
    "temperature": {**NUMBER, "minimum": 0},
    "top_p": {**NUMBER, "exclusiveMinimum": 0, "maximum": 1},
    "stream": FLAG,
}
STOP = {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}
OPENAI_SAMPLING = {
    **SAMPLING,
    "n": {**COUNT, "maximum": choices.MAX_CHOICES},
    "seed": {"type": "integer"},
    "stop": STOP,
    "stream_options": OBJECT,
    "frequency_penalty": {**NUMBER, "minimum": -2, "maximum": 2},
    "presence_penalty": {**NUMBER, "minimum": -2, "maximum": 2},
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
}

_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": TEXT, "message": TEXT}},
    },
}
_EVENTS = {"text/event-stream": {"schema": TEXT}}


def operation(
    properties: dict[str, Any], *required: str, streams: bool = False, anthropic: bool = False
) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route that takes a JSON object; unknown fields are ignored, null is a default."""
    schema = {"type": "object", "required": list(required), "properties": properties}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, "responses": answers(streams=streams, anthropic=anthropic)}


def errors() -> dict[int | str, Any]:
    """FastAPI's `responses` of a route that declares its body itself."""
    return {status: one for status, one in answers().items() if status != "200"}


def answers(*, streams: bool = False, anthropic: bool = False) -> dict[str, Any]:
    """What may come back: an object, or events; and errors, all of one shape."""
    whole = {"application/json": {"schema": OBJECT}}
    error = {"application/json": {"schema": _ANTHROPIC_ERROR if anthropic else _OPENAI_ERROR}}
    return {
        "200": {"description": "The answer.", "content": {**whole, **(_EVENTS if streams else {})}},
        "4XX": {"description": "The request is at fault, or there are too many.", "content": error},
        "5XX": {"description": "The server is at fault.", "content": error},
    }
