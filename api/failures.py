"""What ended a request, in words for its client, the log and the metrics."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from api import errors, vllm_serving
from api.context import RequestContext
from app.errors.base import Failure, RemoteFailure, TrivetError

log = logging.getLogger(__name__)


def as_failure(asked: RequestContext, error: Exception) -> Exception:
    """What ended the request: the pipeline's own account of it, a refusal, or what vLLM makes of it."""
    if asked.failure is not None:
        return RemoteFailure(asked.failure)
    if isinstance(error, TrivetError | ValidationError):
        return error
    failure = (error if isinstance(error, vllm_serving.ServingError) else vllm_serving.explain(error)).failure()
    if failure.status >= 500:
        log.error("request %s failed in the API", asked.request_id, exc_info=error)
    return RemoteFailure(failure)


def failure_of(error: Exception) -> Failure:
    """The account of a TrivetError or a failed validation."""
    if isinstance(error, TrivetError):
        return error.failure()
    assert isinstance(error, ValidationError)
    return errors.invalid(error)


def outcome_of(error: BaseException) -> str:
    """What the metrics call it."""
    if isinstance(error, TrivetError | ValidationError):
        return failure_of(error).code
    return TrivetError.code if isinstance(error, Exception) else "cancelled"
