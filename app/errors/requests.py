"""Requests that are not let in: wrong, not allowed, for what is not here, or more than there is room for."""

from __future__ import annotations

from app.errors.base import TrivetError


class InvalidRequest(TrivetError):
    """The client's fault: the same request will fail again."""

    status = 400
    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class MultimodalDisabled(InvalidRequest):
    """Media were sent to a server that was started without `--enable-multimodal`."""

    code = "multimodal_disabled"


class InvalidApiKey(TrivetError):
    """No API key came with the request, or one that is not known."""

    status = 401
    code = "invalid_api_key"


class ModelNotFound(TrivetError):
    status = 404
    code = "model_not_found"


class WrongEndpoint(TrivetError):
    """The served model does something else than the endpoint is for. vLLM's server does not have the endpoint then."""

    status = 404
    code = "wrong_endpoint"


class AdminKeyNeeded(TrivetError):
    """What only an administrator may do was asked for without the key for it."""

    status = 403
    code = "admin_key_needed"


class ResponseNotFound(TrivetError):
    """A stored response was asked for, and there is none."""

    status = 404
    code = "not_found"


class BodyTooLarge(TrivetError):
    status = 413
    code = "request_too_large"


class BodyTooSlow(TrivetError):
    """The client stopped sending in the middle of its body."""

    status = 408
    code = "request_timeout"


class TooManyRequests(TrivetError):
    """The API process has as many requests in flight as its settings allow."""

    status = 429
    code = "rate_limit_exceeded"
    retry_after_s = 1


class BodyMemoryFull(TrivetError):
    """The API process reads as many bytes of request bodies as `api.body_memory_mb` allows."""

    status = 503
    code = "body_memory_full"
    retry_after_s = 1
