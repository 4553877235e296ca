"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from api import metrics
from app.roles import Role

router = APIRouter()


@router.get("/metrics")
async def prometheus(request: Request) -> Response:
    """Prometheus metrics of the API. Each worker serves its engine's; `trivet status` lists where."""
    services = request.app.state.services
    for role in Role:
        metrics.WORKERS.labels(role.value).set(sum(role in worker.roles for worker in services.fleet.now.workers))
    metrics.TOKEN_GAPS.set(services.reader.gaps)
    return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)
