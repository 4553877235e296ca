"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, TypeGuard

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from api import context, errors, vllm_serving
from api.admission import Ticket
from api.context import RequestContext
from api.disconnect import ClientGone, unless_disconnected
from api.services import Services
from app.errors import DeadlineExceeded, Failure, InvalidRequest, RemoteFailure, TrivetError

log = logging.getLogger(__name__)

router = APIRouter()

TIMEOUT_HEADER = "x-request-timeout"
#: Proxies must not hold tokens back.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
ERROR_FRAME = 'data: {"error"'
#: What servers log for a client that closed its connection; nobody receives it.
CLIENT_CLOSED_REQUEST = 499

#: vLLM's frames are text, those of the fast lane are bytes already.
Frames = AsyncGenerator[str | bytes, None]


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions, for text, images and videos, streamed or whole.

    Errors are OpenAI's error object. The header `X-Request-Timeout` (seconds) shortens the server's deadline.
    """
    services: Services = request.app.state.services
    asked = RequestContext(request.state.request_id, _deadline(services, request))
    ticket = Ticket(services)
    try:
        body = await _json_object(request, asked.deadline)
        context.enter(asked)
        answer = await unless_disconnected(request, _answer(services, asked, body))
        if isinstance(answer, Response):
            await asked.close()
            ticket.close("ok")
            return answer
        first, frames = answer
        ticket.first_frame()
        return StreamingResponse(
            _stream(first, frames, asked, ticket), headers=STREAM_HEADERS, media_type="text/event-stream"
        )
    except (ClientGone, ClientDisconnect):
        ticket.close("cancelled")
        await asked.close()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException as error:
        ticket.close(_outcome(error))
        await asked.close()
        raise


async def _answer(
    services: Services, asked: RequestContext, body: dict[str, Any]
) -> Response | tuple[str | bytes, Frames]:
    """A whole response, or the first frame and those to come. An error before any token has its own status."""
    held = await services.intake.admit(body)
    asked.on_close.append(partial(services.intake.release, held))
    request = services.serving.chat_request(body, asked.request_id)
    try:
        answer = await services.serving.chat(request)
    except (TrivetError, ValidationError):
        raise
    except Exception as error:
        raise RemoteFailure(_failure(asked, error)) from error
    if not isinstance(answer, AsyncGenerator):
        return Response(answer.model_dump_json(), media_type="application/json")
    first = await anext(answer)
    if _is_error(first):
        await answer.aclose()
        raise RemoteFailure(_failure_in(asked, first))
    return first, answer


async def _stream(first: str | bytes, frames: Frames, asked: RequestContext, ticket: Ticket) -> Frames:
    outcome = "cancelled"
    try:
        yield first
        async for frame in frames:
            if _is_error(frame):
                raise RemoteFailure(_failure_in(asked, frame))
            yield frame
        outcome = "ok"
    except TrivetError as error:
        outcome = error.code
        yield errors.frame(error.failure())
    finally:
        await frames.aclose()
        await asked.close()
        ticket.close(outcome)


def _is_error(frame: str | bytes) -> TypeGuard[str]:
    """The fast lane raises; vLLM's generator puts its error into a frame."""
    return isinstance(frame, str) and frame.startswith(ERROR_FRAME)


def _outcome(error: BaseException) -> str:
    """What the metrics call it."""
    if isinstance(error, TrivetError):
        return error.code
    if isinstance(error, ValidationError):
        return InvalidRequest.code
    return TrivetError.code if isinstance(error, Exception) else "cancelled"


def _failure(asked: RequestContext, error: Exception) -> Failure:
    """What ended the request: the pipeline's own account of it, or vLLM's."""
    if asked.failure is not None:
        return asked.failure
    failure = (error if isinstance(error, vllm_serving.ServingError) else vllm_serving.explain(error)).failure()
    if failure.status >= 500:
        log.error("request %s failed in the API", asked.request_id, exc_info=error)
    return failure


def _failure_in(asked: RequestContext, frame: str) -> Failure:
    if asked.failure is not None:
        return asked.failure
    return vllm_serving.ServingError(orjson.loads(frame.removeprefix("data: "))["error"]).failure()


async def _json_object(request: Request, deadline: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(deadline - time.time()):
            received = await request.body()
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed before its body had come") from None
    try:
        body = orjson.loads(received)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _deadline(services: Services, request: Request) -> float:
    limit = services.settings.api.request_timeout_s
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return time.time() + limit
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a positive number of seconds", param=TIMEOUT_HEADER)
    return time.time() + min(seconds, limit)
