"""What `/openapi.json` says of keys, so that `/docs` asks for one."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from api.middleware.api_key_guard import METRICS, is_open

SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def describe(app: FastAPI, open_metrics: bool) -> None:
    """Add the keys to the application's schema: for an application that needs one."""
    plain = app.openapi

    def with_keys() -> dict[str, Any]:
        schema = plain()
        schema.setdefault("components", {})["securitySchemes"] = SCHEMES
        schema["security"] = [{name: []} for name in SCHEMES]
        for path, operations in schema["paths"].items():
            if is_open(path) or (open_metrics and path == METRICS):
                for one in operations.values():
                    one["security"] = []
        return schema

    app.openapi = with_keys  # type: ignore[method-assign]
