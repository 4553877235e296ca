"""POST /debug/route."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api import context, media_parts, openapi_bodies
from api.generation import Generation, answer
from api.job import Job
from api.services import Services

router = APIRouter(tags=["Trivet"])

BODY = {"model": openapi_bodies.MODEL, "messages": openapi_bodies.MESSAGES, "max_tokens": openapi_bodies.COUNT}


class Route(Generation):
    """Where a chat request would go."""

    shape = media_parts.CHAT

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        request = services.serving.chat_request(body, request_id)
        asked = context.current()
        job = Job(
            request_id=request_id,
            prompt=await services.serving.chat_prompt(request),
            params={"max_tokens": request.max_completion_tokens or request.max_tokens},
            deadline=asked.deadline,
            priority=request.priority or asked.priority,
            session=asked.session,
            tenant=asked.tenant,
            adapter=asked.adapter.id if asked.adapter is not None else "",
        )
        return await services.pipeline.explain(job)


@router.post("/debug/route", openapi_extra=openapi_bodies.operation(BODY, "messages"), response_model=None)
async def route(request: Request) -> Response:
    """Where this chat request would go now, and why: each candidate's overlap, load and cost. Nothing is sent there.

    Only where `api.explain_routing` is set. `trivet route` shows it as a table.
    """
    return await answer(request, Route())
