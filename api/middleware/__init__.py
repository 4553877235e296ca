"""Pure ASGI middleware: what holds for every request, streams included."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from api.middleware.api_key_guard import ApiKeyGuard
from api.middleware.body_limit import BodyLimit
from api.middleware.body_memory import BodyMemory
from api.middleware.keep_alive import KeepAlive
from api.middleware.last_resort import LastResort
from api.middleware.request_id import RequestId
from app import api_keys
from app.settings_sections import ApiSettings

__all__ = ["ApiKeyGuard", "BodyLimit", "KeepAlive", "LastResort", "RequestId", "install"]

#: What a web page may do; keys travel in headers, so that no cookie is ever needed.
METHODS = ("GET", "POST", "DELETE")
#: What a web page's script may read of an answer, beside the body.
EXPOSED = ("X-Request-Id", "Retry-After", "x-should-retry", "X-Trivet-Timings")


def install(app: FastAPI, api: ApiSettings) -> bool:
    """Put all of it around the app, and answer whether a key is needed. Raises SettingsError for unreadable keys."""
    keys = api_keys.read(api)
    # Innermost first. The id is there for every answer, refusals included; web pages can read them all.
    if api.sse_keep_alive_s > 0:
        app.add_middleware(KeepAlive, interval_s=api.sse_keep_alive_s)
    memory = BodyMemory(int(api.body_memory_mb * 1e6))
    app.add_middleware(BodyLimit, max_bytes=lambda: int(api.max_body_mb * 1e6), memory=memory)
    admin_key = api.admin_key.get_secret_value() if api.admin_key is not None else None
    app.add_middleware(ApiKeyGuard, keys=keys, open_metrics=api.open_metrics, admin_key=admin_key)
    app.add_middleware(LastResort)
    if api.cors_origins:
        # Any header: clients keep adding their own (x-stainless-...), and none opens anything by itself.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=api.cors_origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    app.add_middleware(RequestId)
    return bool(keys)
