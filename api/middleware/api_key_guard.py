"""Who may use the API: those who send one of its keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from api import errors
from app.errors.base import Failure
from app.errors.requests import InvalidApiKey

#: Open to everybody: whether the service is up, and what it could be asked.
OPEN = frozenset({"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})
OPEN_BELOW = "/health/"
METRICS = "/metrics"

NO_KEY = "this API needs a key: send it in the header 'Authorization: Bearer <key>', or 'x-api-key: <key>'"
WRONG_KEY = "the API key is not one that this API knows"


class Lock(NamedTuple):
    """A key as the process keeps it. `tenant` names its owner and cannot be turned back into the key."""

    digest: bytes
    tenant: str


def lock(key: str) -> Lock:
    return Lock(
        hashlib.sha256(key.encode()).digest(), hashlib.sha256(b"trivet tenant " + key.encode()).hexdigest()[:32]
    )


class ApiKeyGuard:
    """Answers 401 to requests without a key, and gives the others a tenant: `scope["state"]["tenant"]`.

    The tenant is 32 hexadecimal digits that follow from the key, and "" where no keys are set. The state also says
    whether the `admin_key` came (`admin`), which opens everything, and whether there is no key of any kind (`keyless`).
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_metrics: bool, admin_key: str | None = None) -> None:
        self._app = app
        self._locks = [lock(key) for key in keys]
        self._admin = [lock(admin_key)] if admin_key else []
        self._open_metrics = open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is None:
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        answer = errors.response(refusal, scope["path"])
        if refusal.status == 401:
            answer.headers["WWW-Authenticate"] = "Bearer"
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> Failure | None:
        """Why the request may not pass, if so. Sets its tenant."""
        state = scope.setdefault("state", {})
        state["tenant"] = ""
        state["keyless"] = not self._locks and not self._admin
        given = _given(scope)
        state["admin"] = any(opened(self._admin, one) is not None for one in given)
        if not self._locks or self._is_open(scope, route_path(scope)):
            return None
        locks = self._locks + self._admin
        tenants = [tenant for one in given if (tenant := opened(locks, one)) is not None]
        if not tenants:
            return InvalidApiKey(WRONG_KEY if given else NO_KEY).failure()
        state["tenant"] = tenants[0]
        return None

    def _is_open(self, scope: Scope, path: str) -> bool:
        # Browsers ask without a key what they may do (CORS).
        asks = scope["type"] == "http" and scope["method"] == "OPTIONS"
        return asks or is_open(path) or (self._open_metrics and path == METRICS)


def route_path(scope: Scope) -> str:
    """The path that routing goes by: without the prefix under which a proxy serves the API (`--root-path`)."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    below = path.removeprefix(root)
    return below if below == "" or below.startswith("/") else path


def is_open(path: str) -> bool:
    """Whether nobody needs a key for the path, whatever the settings."""
    return path in OPEN or path.startswith(OPEN_BELOW)


def opened(locks: Iterable[Lock], key: bytes) -> str | None:
    """The tenant of the key. Every lock is tried, in constant time: how long it takes tells nothing."""
    digest = hashlib.sha256(key).digest()
    found: str | None = None
    for one in locks:
        if hmac.compare_digest(digest, one.digest):
            found = one.tenant
    return found


def _given(scope: Scope) -> list[bytes]:
    """The keys that the request brings: OpenAI's clients send the one header, Anthropic's the other."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return [key for key in (bearer, headers.get(b"x-api-key", b"").strip()) if key]
