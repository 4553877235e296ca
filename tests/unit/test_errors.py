"""app.errors: one tree, on the wire and back."""

import inspect

import msgspec
import pytest

from app import errors
from app.errors import Failure, RemoteFailure, TensorError, TrivetError

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, TrivetError) and kind is not RemoteFailure
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_failure_crosses_the_wire_and_is_raised_again(kind: type[TrivetError]) -> None:
    failure = kind("what went wrong", param="messages[0]").failure()
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure
    again = RemoteFailure(failure)
    assert again.failure() == failure
    assert (again.status, again.code, str(again)) == (kind.status, kind.code, failure.message)
    if not issubclass(kind, TensorError):
        assert failure.message == "what went wrong"


def test_a_remote_failure_changes_no_other() -> None:
    RemoteFailure(Failure(418, "teapot", "short and stout"))
    assert (TrivetError.status, RemoteFailure.status) == (500, 500)
    assert RemoteFailure(Failure(404, "gone", "x")).failure().status == 404


def test_codes_are_distinct_and_what_may_be_tried_again_says_when() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    for kind in KINDS:
        assert (kind.retry_after_s is not None) == (kind.status in (429, 503)), kind


TENSOR_KINDS = [kind for kind in KINDS if issubclass(kind, TensorError)]


@pytest.mark.parametrize("kind", TENSOR_KINDS, ids=lambda kind: kind.__name__)
def test_clients_do_not_hear_of_hosts_and_paths(kind: type[TensorError]) -> None:
    detail = "gpu7-4711-ab12cd34 did not send /dev/shm/trivet-0/x within 10.0 s"
    error = kind(detail, param="messages[0]")
    assert str(error) == error.message == detail
    assert error.failure() == Failure(503, kind.code, TensorError.FOR_CLIENTS, "messages[0]", 1)
