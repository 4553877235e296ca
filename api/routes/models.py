"""GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """The models that this server answers for, as OpenAI lists them."""
    listing = await request.app.state.services.serving.list_models()
    return JSONResponse(listing.model_dump())
