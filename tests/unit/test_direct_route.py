"""api.direct_route: such a route answers, fails and is documented as any other."""

from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from api import errors
from api.direct_route import DirectRoute
from app.errors.serving import NoWorker


async def echo(request: Request) -> Response:
    """Says what it hears."""
    body = await request.body()
    if body == b"fail":
        raise NoWorker("no worker for: decode")
    return Response(body, 201, {"x-found": request.url.path})


def application(route: type[APIRoute]) -> FastAPI:
    app = FastAPI()
    errors.install(app)
    router = APIRouter(tags=["OpenAI"], route_class=route)
    router.post("/v1/echo", openapi_extra={"requestBody": {"content": {"application/json": {}}}}, response_model=None)(
        echo
    )
    app.include_router(router)
    return app


async def asked(route: type[APIRoute], method: str, content: bytes) -> tuple[Any, ...]:
    transport = httpx.ASGITransport(application(route))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        answer = await client.request(method, "/v1/echo", content=content)
    return answer.status_code, answer.headers, answer.content


@pytest.mark.parametrize(
    ("method", "content", "status"),
    [("POST", b"hello", 201), ("POST", b"", 201), ("POST", b"fail", 503), ("GET", b"", 405)],
)
async def test_it_answers_as_others_do(method: str, content: bytes, status: int) -> None:
    direct = await asked(DirectRoute, method, content)
    assert direct == await asked(APIRoute, method, content)
    assert direct[0] == status


def test_it_is_documented_as_others_are() -> None:
    assert application(DirectRoute).openapi() == application(APIRoute).openapi()
