"""An error: raised here, told on the wire, and raised again by whoever hears of it."""

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


class RemoteFailure(TrivetError):
    """An error that another process reported, raised again here with its own status and code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, param=failure.param)
        self.status = failure.status  # type: ignore[misc]
        self.code = failure.code  # type: ignore[misc]
        self.retry_after_s = failure.retry_after_s  # type: ignore[misc]
