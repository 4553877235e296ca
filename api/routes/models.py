"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from api import openapi_bodies
from app.errors import ModelNotFound

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """The models that this server answers for, as OpenAI lists them. An adapter has the model as its `parent`."""
    return JSONResponse(await _listing(request))


@router.get("/v1/models/{model:path}", openapi_extra={"responses": openapi_bodies.answers()}, response_model=None)
async def one_model(request: Request, model: str) -> JSONResponse:
    """One of them. Its name may have slashes."""
    for one in (await _listing(request))["data"]:
        if one["id"] == model:
            return JSONResponse(one)
    name = request.app.state.services.settings.served_name
    raise ModelNotFound(f"the model does not exist; this server has: {name}", param="model")


async def _listing(request: Request) -> dict[str, Any]:
    services = request.app.state.services
    listing = await services.serving.list_models(await services.adapters.published())
    found: dict[str, Any] = listing.model_dump()
    return found
