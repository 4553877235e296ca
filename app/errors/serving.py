"""Requests that were let in and come to nothing: no worker, no broker, a failed stage, no time left."""

from __future__ import annotations

from app.errors.base import TrivetError


class NoWorker(TrivetError):
    """No live worker can run a stage that the request needs."""

    status = 503
    code = "no_worker"
    retry_after_s = 5


class WorkerLost(TrivetError):
    """The worker that ran the request died or lost its engine."""

    status = 503
    code = "worker_lost"
    retry_after_s = 1


class GrammarsUnavailable(TrivetError):
    """The process that tries schemas and grammars does not run, for the moment."""

    status = 503
    code = "grammars_unavailable"
    retry_after_s = 2


class BrokerUnavailable(TrivetError):
    """Redis did not answer in time."""

    status = 503
    code = "broker_unavailable"
    retry_after_s = 2


class EncodeFailed(TrivetError):
    """No worker could encode an item, the one that prefills included."""

    status = 503
    code = "encode_failed"
    retry_after_s = 1


class RecordTooLarge(TrivetError):
    """An item's record is larger than `items.max_record_kb`: the item cannot be shared."""

    code = "record_too_large"


class TokensLost(TrivetError):
    """A hole in the token stream that the replay stream could not fill."""

    status = 500
    code = "tokens_lost"


class KVLeaseExpired(TrivetError):
    """The prefilled KV blocks may have been freed before the decode worker could read them."""

    status = 503
    code = "kv_lease_expired"
    retry_after_s = 1


class DeadlineExceeded(TrivetError):
    status = 504
    code = "deadline_exceeded"


class EngineFailed(TrivetError):
    """The engine answered a request with an error of its own."""

    status = 500
    code = "engine_error"
