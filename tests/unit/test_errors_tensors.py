"""app.errors.tensors: what is for logs stays in them."""

import pytest

from app.errors.base import Failure
from app.errors.tensors import TensorError
from tests import errors

KINDS = [kind for kind in errors.kinds() if issubclass(kind, TensorError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_clients_do_not_hear_of_hosts_and_paths(kind: type[TensorError]) -> None:
    detail = "gpu7-4711-ab12cd34 did not send /dev/shm/trivet-0/x within 10.0 s"
    error = kind(detail, param="messages[0]")
    assert str(error) == error.message == detail
    assert error.failure() == Failure(503, kind.code, TensorError.FOR_CLIENTS, "messages[0]", 1)
