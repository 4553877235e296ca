"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from api import metrics, openapi_bodies
from app.adapter_registry import Published
from app.errors.requests import ModelNotFound
from app.errors.serving import BrokerUnavailable

log = logging.getLogger(__name__)

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """The models that this server answers for, as OpenAI lists them. An adapter has the model as its `parent`; while
    Redis does not answer there are none in the list."""
    adapters: list[Published] = []
    try:
        adapters = await request.app.state.services.adapters.published()
    except BrokerUnavailable as error:
        metrics.LISTED_ALONE.inc()
        log.warning("the model is listed without its adapters: %s", error.message)
    return JSONResponse(await _listing(request, adapters))


@router.get("/v1/models/{model:path}", openapi_extra={"responses": openapi_bodies.answers()}, response_model=None)
async def one_model(request: Request, model: str) -> JSONResponse:
    """One of them. Its name may have slashes."""
    services = request.app.state.services
    name = services.settings.served_name
    adapters = [] if model == name else await services.adapters.published()
    for one in (await _listing(request, adapters))["data"]:
        if one["id"] == model:
            return JSONResponse(one)
    raise ModelNotFound(f"the model does not exist; this server has: {name}", param="model")


async def _listing(request: Request, adapters: list[Published]) -> dict[str, Any]:
    listing = await request.app.state.services.serving.list_models(adapters)
    found: dict[str, Any] = listing.model_dump()
    return found
