"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from api import metrics

router = APIRouter()


@router.get("/metrics")
async def prometheus(request: Request) -> Response:
    """Prometheus metrics of the API. Each worker serves its engine's; `trivet status` lists where."""
    request.app.state.services.measure()
    return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)
