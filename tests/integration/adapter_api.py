"""The routes of adapters, as one API process has them, over a real registry."""

from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI

from api import errors
from api.adapters import Adapters
from api.middleware import RequestId
from api.middleware.api_key_guard import ApiKeyGuard
from api.routes import loras
from app.adapter_registry import AdapterRegistry
from app.fleet import FleetView
from app.registry import Registry
from app.settings import Settings
from tests.integration.adapter_cluster import LEASE_S, MODEL

BASE = "http://127.0.0.1:8000"


def adapters(redis: Any) -> Adapters:
    """Those of one API process."""
    fleet = FleetView(Registry(redis, LEASE_S), MODEL, lambda _gone: None)
    return Adapters(AdapterRegistry(redis, MODEL), fleet, Settings(model=MODEL))


def client(redis: Any, at: str = "127.0.0.1", **guard: Any) -> httpx.AsyncClient:
    """Of a process that is asked from the address `at`."""
    chosen: dict[str, Any] = {"keys": (), "open_metrics": False, **guard}
    app = FastAPI()
    app.state.services = SimpleNamespace(adapters=adapters(redis))
    app.add_middleware(ApiKeyGuard, **chosen)
    app.add_middleware(RequestId)
    errors.install(app)
    app.include_router(loras.router)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(at, 1)), base_url=BASE, timeout=30)
