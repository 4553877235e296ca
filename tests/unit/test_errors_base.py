"""app.errors.base: what another process reported is raised with its own status."""

from app.errors.base import Failure, RemoteFailure, TrivetError


def test_a_remote_failure_changes_no_other() -> None:
    RemoteFailure(Failure(418, "teapot", "short and stout"))
    assert (TrivetError.status, RemoteFailure.status) == (500, 500)
    assert RemoteFailure(Failure(404, "gone", "x")).failure().status == 404
