"""Every error that a client sees: OpenAI's error object, under 4 KB, without an echo of the input."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from app.errors import Failure, InvalidRequest, TrivetError

log = logging.getLogger(__name__)

MAX_MESSAGE = 1000
MAX_DETAILS = 5
#: Statuses that openai's clients would try again although the same request will fail again.
NOT_WORTH_RETRYING = frozenset({500, 504})


def body(failure: Failure) -> bytes:
    """The error object as JSON."""
    kind = "invalid_request_error" if failure.status < 500 and failure.status != 429 else "server_error"
    if failure.status == 429:
        kind = "rate_limit_error"
    error = {"message": failure.message[:MAX_MESSAGE], "type": kind, "param": failure.param, "code": failure.code}
    return orjson.dumps({"error": error})


def response(failure: Failure) -> Response:
    headers = {}
    if failure.retry_after_s is not None:
        headers["Retry-After"] = str(failure.retry_after_s)
    if failure.status in NOT_WORTH_RETRYING:
        headers["x-should-retry"] = "false"
    return Response(body(failure), failure.status, headers, media_type="application/json")


def frame(failure: Failure) -> str:
    """The error as the last event of a stream whose status has been sent."""
    return f"data: {body(failure).decode()}\n\ndata: [DONE]\n\n"


def invalid(error: ValidationError | RequestValidationError) -> Failure:
    """A failed validation, by field. The input is left out: pydantic would repeat it once for each error."""
    details = error.errors() if isinstance(error, RequestValidationError) else error.errors(include_input=False, include_url=False)
    texts = [f"{_path(one['loc'])}: {one['msg'][:200]}" for one in details[:MAX_DETAILS]]
    more = f" (and {len(details) - MAX_DETAILS} more)" if len(details) > MAX_DETAILS else ""
    return Failure(400, InvalidRequest.code, "; ".join(texts) + more, _path(details[0]["loc"]))


def _path(loc: tuple[Any, ...]) -> str:
    """("messages", 0, "UserMessage", "content") -> messages[0].content: pydantic's own names of union members are no fields."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool", "list", "dict", "body"):
            path += f".{part}" if path else part
    return path or "body"


def install(app: FastAPI) -> None:
    """Answer every exception of every route in this shape."""

    @app.exception_handler(TrivetError)
    async def trivet_error(_: Request, error: TrivetError) -> Response:
        return response(error.failure())

    @app.exception_handler(ValidationError)
    async def validation_error(_: Request, error: ValidationError) -> Response:
        return response(invalid(error))

    @app.exception_handler(RequestValidationError)
    async def request_validation_error(_: Request, error: RequestValidationError) -> Response:
        return response(invalid(error))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return response(Failure(error.status_code, code, str(error.detail)))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        log.exception("unexpected error", exc_info=error)
        return response(Failure(500, "internal_error", "internal error (see the API's log)"))
