"""A few routes behind the API's own middleware: `uvicorn tests.served_app:app`, for tests with real servers."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from api import errors, media_parts, middleware, openapi_security
from api.admission import Ticket
from api.context import RequestContext
from api.direct_route import DirectRoute
from api.event_stream import Frames, Stream
from api.request_body import json_object
from app import settings
from app.errors.serving import NoWorker
from app.settings_sections import ApiSettings
from tests.redis_server import free_port

ROOT = Path(__file__).parents[1]


def create(api: ApiSettings) -> FastAPI:
    made = FastAPI()
    if middleware.install(made, api):
        openapi_security.describe(made, api.open_metrics)
    errors.install(made)

    @made.get("/v1/who")
    async def who(request: Request) -> dict[str, Any]:
        return {"tenant": request.state.tenant, "pid": os.getpid(), "id": request.state.request_id}

    made.include_router(_generating())

    @made.post("/v1/messages")
    async def messages(body: dict[str, Any]) -> Any:
        raise NoWorker(f"no worker for: {body.get('model')}")

    @made.get("/health/live")
    @made.get("/health/ready")
    @made.get("/metrics")
    async def unguarded() -> str:
        return "here"

    return made


def _generating() -> APIRouter:
    router = APIRouter(route_class=DirectRoute)
    services: Any = SimpleNamespace(settings=SimpleNamespace(api=SimpleNamespace(max_in_flight=99)), in_flight=0)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        asked = RequestContext(request.state.request_id, time.time() + 60)
        body = (await json_object(request, asked.deadline, media_parts.NONE)).fields
        if body["model"] == "unserved":
            raise NoWorker("no worker for: decode")
        if body["model"] == "broken":
            raise RuntimeError("a bug")
        begun: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
        return Stream(_frames(body.get("silence", 0.0), body.get("note")), begun, asked, Ticket(services))

    return router


async def _frames(silence_s: float, note: str | None) -> Frames:
    start = 'data: {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, '
    yield start + '"delta": {"role": "assistant", "content": "a"}}]}\n\n'
    try:
        await asyncio.sleep(silence_s)
    finally:
        if note is not None:
            print(f"the stream of {note!r} has ended", flush=True)
    yield start + '"delta": {"content": "b"}, "finish_reason": "stop"}]}\n\n'
    yield "data: [DONE]\n\n"


@contextlib.contextmanager
def served(log: Path, *flags: str, **variables: str) -> Iterator[str]:
    """The URL of a server of it, with uvicorn's flags and these variables. What it says goes to `log`."""
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings.ENV_PREFIX)}
    command = [sys.executable, "-m", "uvicorn", "tests.served_app:app", "--port", str(port), "--log-level", "debug"]
    with open(log, "wb") as out:
        process = subprocess.Popen([*command, *flags], env=kept | variables, cwd=ROOT, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    with httpx.Client(trust_env=False, transport=httpx.HTTPTransport(retries=8)) as client:
        assert client.get(f"{url}/health/live", timeout=30).status_code == 200, process.poll()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    return create(settings.current().api)
