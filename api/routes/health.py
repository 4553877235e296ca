"""GET /health/live and /health/ready."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter()


@router.get("/health/live")
async def live() -> dict[str, str]:
    """200 while the process answers at all."""
    return {"status": "live"}


@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """200 when a request would be served now; 503 otherwise, naming the roles without a worker."""
    services = request.app.state.services
    missing = services.fleet.now.missing(services.settings.enable_multimodal)
    workers = {worker.id: sorted(worker.roles) for worker in services.fleet.now.workers}
    if not services.fleet.reachable:
        return _not_ready("Redis is not reachable", missing, workers)
    if missing:
        return _not_ready(f"no worker for: {', '.join(missing)}", missing, workers)
    return JSONResponse({"status": "ready", "model": services.settings.served_name, "workers": workers})


def _not_ready(reason: str, missing: list[str], workers: dict[str, list[str]]) -> JSONResponse:
    content = {"status": "not ready", "reason": reason, "missing": [str(role) for role in missing], "workers": workers}
    return JSONResponse(content, 503, {"Retry-After": "5"})
