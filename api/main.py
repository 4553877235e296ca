"""The OpenAI API: `uvicorn api.main:app`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from api import errors
from api.middleware import BodyLimit, RequestId
from api.routes import chat, health, metrics, models
from app import logs, settings

log = logging.getLogger(__name__)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Hold the process's services while it serves. What is wrong with the start is said in one line."""
    from api.services import running

    chosen = settings.current()
    try:
        context = running(chosen)
        app.state.services = await context.__aenter__()
    except Exception as error:
        log.critical("the API cannot start: %s: %s", type(error).__name__, error)
        raise
    log.info("API %s is ready for %s", app.state.services.id, chosen.served_name)
    try:
        yield
    finally:
        await context.__aexit__(None, None, None)


def create() -> FastAPI:
    logs.configure(settings.current().log_level)
    made = FastAPI(
        title="Trivet", description="OpenAI-compatible API over encode, prefill and decode workers.", lifespan=lifespan
    )
    # Outermost last: the id is there for every answer, refusals included.
    made.add_middleware(BodyLimit, max_bytes=lambda: int(settings.current().api.max_body_mb * 1e6))
    made.add_middleware(RequestId)
    errors.install(made)
    for part in (chat, models, health, metrics):
        made.include_router(part.router)
    return made


app = create()
