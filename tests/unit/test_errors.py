"""app.errors: one tree, on the wire and back."""

import msgspec
import pytest

from app.errors.base import Failure, RemoteFailure, TrivetError
from app.errors.tensors import TensorError
from tests import errors

KINDS = [kind for kind in errors.kinds() if kind is not RemoteFailure]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_failure_crosses_the_wire_and_is_raised_again(kind: type[TrivetError]) -> None:
    failure = kind("what went wrong", param="messages[0]").failure()
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure
    again = RemoteFailure(failure)
    assert again.failure() == failure
    assert (again.status, again.code, str(again)) == (kind.status, kind.code, failure.message)
    if not issubclass(kind, TensorError):
        assert failure.message == "what went wrong"


def test_codes_are_distinct_and_what_may_be_tried_again_says_when() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    for kind in KINDS:
        assert (kind.retry_after_s is not None) == (kind.status in (429, 503)), kind
