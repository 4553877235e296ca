"""The OpenAI API: `uvicorn api.main:app`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI

from api import errors, malloc, middleware, openapi_security, processes
from api.routes import (
    chat,
    completions,
    embeddings,
    health,
    loras,
    messages,
    metrics,
    models,
    responses,
    routing,
    stored_responses,
    tokenize,
)
from app import api_keys, garbage, logs, settings

log = logging.getLogger(__name__)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Hold the process's services while it serves. What is wrong with the start is said in one line."""
    from api import vllm_serving
    from api.services import running

    chosen = settings.current()
    malloc.map_large_blocks()
    async with AsyncExitStack() as last:
        try:
            app.state.services = await last.enter_async_context(running(chosen))
            vllm_serving.keep_environment()
        except Exception as error:
            log.critical("the API cannot start: %s: %s", type(error).__name__, error)
            processes.end_siblings()
            raise
        garbage.leave_out_what_is_there()
        keys = (
            "one has to send a key" if api_keys.read(chosen.api) else "no keys are set: whoever reaches it may use it"
        )
        log.info("API %s is ready for %s; %s", app.state.services.id, chosen.served_name, keys)
        yield


def create() -> FastAPI:
    chosen = settings.current()
    logs.configure(chosen.log_level)
    made = FastAPI(
        title="Trivet", description="OpenAI-compatible API over encode, prefill and decode workers.", lifespan=lifespan
    )
    if middleware.install(made, chosen.api):
        openapi_security.describe(made, chosen.api.open_metrics)
    errors.install(made)
    of_models = (chat, completions, responses, stored_responses, messages, embeddings, tokenize)
    for part in (*of_models, models, loras, health, metrics):
        made.include_router(part.router)
    if chosen.api.explain_routing:
        made.include_router(routing.router)
    return made


app = create()
