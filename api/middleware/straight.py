"""The short way of a stream's pieces to the server.

Middleware looks at how an answer begins and passes the rest on: without this, every piece would go through all of it.
"""

from __future__ import annotations

from starlette.types import Scope, Send

_WAY = "trivet.straight_send"


def lay(scope: Scope, send: Send) -> None:
    """Whoever wants to see every piece of the answer lays a way of its own over the last one."""
    scope[_WAY] = send


def way(scope: Scope, otherwise: Send) -> Send:
    """For what comes after the answer's start, which goes through all middleware."""
    send: Send = scope.get(_WAY, otherwise)
    return send


def close(scope: Scope) -> None:
    """The answer has ended. A server's `send` has the scope, and so would not be gone before a collection of cycles."""
    scope.pop(_WAY, None)
