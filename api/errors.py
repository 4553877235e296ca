"""Every error that a client sees: OpenAI's error object (Anthropic's for its API), under 4 KB, without the input."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from api import anthropic_errors
from app.errors.base import Failure, TrivetError
from app.errors.requests import InvalidRequest

log = logging.getLogger(__name__)

#: Bytes of a message and of a field's path; JSON's escapes can double them.
MAX_MESSAGE = 1000
MAX_PATH = 200
#: Fields with longer names are no fields of ours but a client's own keys.
MAX_NAME = 64
MAX_DETAILS = 5
#: Steps of a path that pydantic adds and no client wrote.
TYPE_NAMES = frozenset({"str", "int", "float", "bool", "list", "dict", "body"})
#: Statuses that openai's clients would try again although the same request will fail again.
NOT_WORTH_RETRYING = frozenset({500, 504})
UNEXPECTED = Failure(500, "internal_error", "internal error (see the API's log)")


def body(failure: Failure) -> bytes:
    """The error object as JSON."""
    kind = "invalid_request_error" if failure.status < 500 and failure.status != 429 else "server_error"
    if failure.status == 429:
        kind = "rate_limit_error"
    param = None if failure.param is None else _cut(failure.param, MAX_PATH)
    error = {"message": _cut(failure.message, MAX_MESSAGE), "type": kind, "param": param, "code": failure.code}
    return orjson.dumps({"error": error})


def response(failure: Failure, path: str = "") -> Response:
    """The answer to a request for `path`, in the shape that its clients read."""
    headers = {}
    if failure.retry_after_s is not None:
        headers["Retry-After"] = str(failure.retry_after_s)
    if failure.status in NOT_WORTH_RETRYING:
        headers["x-should-retry"] = "false"
    content = anthropic_body(failure) if anthropic_errors.wanted(path) else body(failure)
    return Response(content, failure.status, headers, media_type="application/json")


def frame(failure: Failure) -> str:
    """The error as the last event of a stream whose status has been sent."""
    return f"data: {body(failure).decode()}\n\ndata: [DONE]\n\n"


def anthropic_body(failure: Failure) -> bytes:
    """The error object of Anthropic's API as JSON."""
    return anthropic_errors.body(failure, _cut(failure.message, MAX_MESSAGE))


def anthropic_frame(failure: Failure) -> str:
    """The error as the last event of a stream of Anthropic's API."""
    return f"event: error\ndata: {anthropic_body(failure).decode()}\n\n"


def invalid(error: ValidationError | RequestValidationError) -> Failure:
    """A failed validation, by field. The input is left out: pydantic would repeat it once for each error."""
    details = error.errors() if isinstance(error, RequestValidationError) else error.errors(include_input=False)
    texts = [f"{_path(one['loc'])}: {one['msg'][:200]}" for one in details[:MAX_DETAILS]]
    more = f" (and {len(details) - MAX_DETAILS} more)" if len(details) > MAX_DETAILS else ""
    return Failure(400, InvalidRequest.code, "; ".join(texts) + more, _path(details[0]["loc"]))


def _path(loc: tuple[Any, ...]) -> str:
    """("messages", 0, "UserMessage", "content") -> messages[0].content: names of union members are no fields."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and len(part) <= MAX_NAME and part not in TYPE_NAMES:
            path += f".{part}" if path else part
    return path[:MAX_PATH] or "body"


def _cut(text: str, limit: int) -> str:
    """At most `limit` bytes, without what JSON writes as an escape of six."""
    printable = "".join(char if char.isprintable() or char == "\n" else " " for char in text[:limit])
    return printable.encode()[:limit].decode(errors="ignore")


def install(app: FastAPI) -> None:
    """Answer every exception of every route in this shape."""

    @app.exception_handler(TrivetError)
    async def trivet_error(request: Request, error: TrivetError) -> Response:
        return response(error.failure(), request.scope["path"])

    @app.exception_handler(ValidationError)
    async def validation_error(request: Request, error: ValidationError) -> Response:
        return response(invalid(error), request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def request_validation_error(request: Request, error: RequestValidationError) -> Response:
        return response(invalid(error), request.scope["path"])

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, TrivetError):  # what FastAPI makes of one while it reads a body
            return response(error.__cause__.failure(), request.scope["path"])
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        answer = response(Failure(error.status_code, code, str(error.detail)), request.scope["path"])
        answer.headers.update(error.headers or {})  # Allow, of a 405
        return answer

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.exception("unexpected error", exc_info=error)
        return response(UNEXPECTED, request.scope["path"])
