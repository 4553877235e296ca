"""Adapters that are refused, do not load, or are not where a request needs them."""

from __future__ import annotations

from app.errors.base import TrivetError
from app.errors.requests import InvalidRequest


class AdapterRefused(InvalidRequest):
    """An adapter, its name or its source is not allowed, or not what it claims to be. The message says why."""

    code = "invalid_adapter"


class AdapterConflict(TrivetError):
    """An adapter of this name is being loaded from another source."""

    status = 409
    code = "adapter_conflict"


class AdapterLoadFailed(TrivetError):
    """A worker could not load an adapter that is nothing the matter with, or not in time."""

    status = 502
    code = "adapter_load_failed"


class AdapterLoading(TrivetError):
    """The adapter that a request names is not on all workers yet."""

    status = 503
    code = "adapter_loading"
    retry_after_s = 2


class AdapterMissing(TrivetError):
    """No worker that could run a stage of the request holds the adapter that it names."""

    status = 503
    code = "adapter_missing"
    retry_after_s = 1
