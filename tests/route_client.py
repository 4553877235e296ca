"""A route under what every route is under, without the rest of the API: for tests of the route."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI

from api import errors
from api.middleware import RequestId


@asynccontextmanager
async def route_client(router: APIRouter, services: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.state.services = services
    app.add_middleware(RequestId)
    errors.install(app)
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as made:
        yield made
