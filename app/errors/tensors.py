"""Buffers of other processes that cannot be read."""

from __future__ import annotations

from typing import ClassVar

from app.errors.base import Failure, TrivetError


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
