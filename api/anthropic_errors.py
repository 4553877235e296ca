"""Errors as Anthropic's clients read them, for `/v1/messages`."""

from __future__ import annotations

import orjson

from app.errors.base import Failure

PREFIX = "/v1/messages"
#: Status -> Anthropic's name for it; what is not here goes by its hundred.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def wanted(path: str) -> bool:
    """Whether who asks for this path expects this shape."""
    return path.endswith(PREFIX) or f"{PREFIX}/" in path  # a prefix may be before it (--root-path)


def body(failure: Failure, message: str) -> bytes:
    """The error object as JSON. `message` is the failure's, cut to size."""
    kind = TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
