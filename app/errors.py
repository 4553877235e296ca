"""What can go wrong with a request, as one tree.

Every error knows the HTTP status, the OpenAI `code`, and whether a client may try again, so that a stage, the router
and the API raise the same classes and the edge needs no table.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Failure(msgspec.Struct, omit_defaults=True, frozen=True):
    """An error on the wire, from a worker to the API. `status` is the HTTP status that the client gets."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None


class TrivetError(Exception):
    """An error with an answer for the client. `param` names the request's field at fault, if one is."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def failure(self) -> Failure:
        return Failure(self.status, self.code, self.message, self.param, self.retry_after_s)


class InvalidRequest(TrivetError):
    """The client's fault: the same request will fail again."""

    status = 400
    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class MediaRefused(InvalidRequest):
    """A media part that is not allowed, not supported, or not what it claims to be."""

    code = "invalid_media"


class MediaTooLarge(MediaRefused):
    """A medium has more bytes than `media.max_item_mb`."""

    code = "media_too_large"


class MediaUrlRefused(MediaRefused):
    """The policy on media URLs (`media_urls`) does not let this one be fetched, or a redirect of it be followed."""

    code = "media_url_refused"


class MediaUnreachable(MediaRefused):
    """The media host did not give the medium: no address, no connection, not in time, or another answer.

    A client's fault like the others: a status that says "try again" would send every dead link three times.
    """

    code = "media_unreachable"


class MediaUuidNotFound(MediaRefused):
    """A part has no medium but a client's name for one, and nobody knows the name, or has the medium any more."""

    code = "media_uuid_not_found"


class MediaUuidTaken(MediaRefused):
    """A client's name for a medium came with another medium, and `media.rebind_uuids` is off."""

    code = "media_uuid_taken"


class AdapterRefused(InvalidRequest):
    """An adapter, its name or its source is not allowed, or not what it claims to be. The message says why."""

    code = "invalid_adapter"


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


class MediaExpired(TrivetError):
    """Neither a medium's bytes nor its embedding are where they were when the request came.

    Of a medium that this request brought itself, its time was up. One that was only referred to is got again.
    """

    status = 503
    code = "media_expired"
    retry_after_s = 1


class MediaMemoryFull(TrivetError):
    """The API process holds as many media bytes as its settings allow."""

    status = 503
    code = "media_memory_full"
    retry_after_s = 1


class MediaFetchesBusy(TrivetError):
    """As many media are being fetched as `media_urls.max_concurrent_fetches` allows, and none of them ended in time."""

    status = 503
    code = "media_fetches_busy"
    retry_after_s = 1


class TensorError(TrivetError):
    """A buffer of another process could not be read, or one of this process not be shown to others.

    The message is for logs: it names hosts, processes and paths. Clients, and other processes, get `FOR_CLIENTS`.
    """

    FOR_CLIENTS: ClassVar[str] = "a medium or embedding could not be moved between the server's processes; try again"

    status = 503
    code = "tensor_unavailable"
    retry_after_s = 1

    def failure(self) -> Failure:
        return Failure(self.status, self.code, self.FOR_CLIENTS, self.param, self.retry_after_s)


class TensorMissing(TensorError):
    """The holder has taken the buffer away."""

    code = "tensor_missing"


class TensorExpired(TensorError):
    """The descriptor's lease is over."""

    code = "tensor_expired"


class TensorIncompatible(TensorError):
    """What lies there has another type, shape or length than the descriptor says, or than the reader can use."""

    code = "tensor_incompatible"


class TensorTooLarge(TensorError):
    """Larger than `tensors.max_buffer_mb`."""

    code = "tensor_too_large"


class PeerGone(TensorError):
    """The process that held the buffer does not answer."""

    code = "peer_gone"


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


class RemoteFailure(TrivetError):
    """An error that another process reported, raised again here with its own status and code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, param=failure.param)
        self.status = failure.status  # type: ignore[misc]
        self.code = failure.code  # type: ignore[misc]
        self.retry_after_s = failure.retry_after_s  # type: ignore[misc]
