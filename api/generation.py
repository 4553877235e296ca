"""The one way of every request that generates, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, ClassVar, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from api import context, deadline, errors, media_parts, route_headers, vllm_serving
from api.admission import Ticket
from api.context import RequestContext
from api.disconnect import ClientGone, unless_disconnected
from api.ending import to_the_end
from api.event_stream import Frame, Frames, Stream
from api.failures import as_failure, failure_of, outcome_of
from api.inline_media import Body
from api.intake import Admission
from api.large_answer import LargeAnswer, is_large
from api.middleware import body_limit
from api.middleware.keep_alive import PING
from api.request_body import json_object
from api.services import Services
from api.timings import HEADER, Timings
from app.errors.base import Failure
from app.errors.media import MediaExpired
from app.errors.serving import DeadlineExceeded

log = logging.getLogger(__name__)
T = TypeVar("T")

#: What servers log for a client that closed its connection; nobody receives it.
CLIENT_CLOSED_REQUEST = 499


class Detached:
    """A request that goes on without its client, and the answer that came before. `id` is what it is cancelled by."""

    id: str
    answer: bytes

    async def run(self) -> None:
        """To its end. One that is cancelled, or never begun, ends with the request's context."""
        raise NotImplementedError

    async def failed(self, failure: Failure) -> None:
        """What `run` raised is this."""
        raise NotImplementedError


class Generation:
    """One request to an endpoint, and how that endpoint speaks: here, as OpenAI's chat and completions do.

    What a method raises becomes the answer: TrivetError and ValidationError as they are, anything else as vLLM
    explains it.
    """

    #: Where the endpoint's bodies have media.
    shape: ClassVar[media_parts.Shape] = media_parts.NONE
    #: Whether it answers as a stream where the body says `stream`.
    streams: ClassVar[bool] = True
    #: How a frame begins that has vLLM's own account of an error in it.
    error_head: ClassVar[str] = 'data: {"error"'

    async def run(self, services: Services, body: dict[str, Any], request_id: str) -> Any:
        """An async generator of frames, or what `whole` takes, or a Response, or Detached."""
        raise NotImplementedError

    async def admit(self, services: Services, body: Body, asked: RequestContext) -> Admission:
        """Let the body's media in, before `run` sees it."""
        return await services.intake.admit(body.fields, body.shape, asked.tenant)

    def whole(self, answer: Any) -> str | bytes:
        """The answer as JSON."""
        return str(answer.model_dump_json())

    def error_in(self, frame: Frame) -> dict[str, Any] | None:
        """vLLM's error object, if the frame is one. The fast lane raises instead."""
        if isinstance(frame, str) and frame.startswith(self.error_head):
            found: dict[str, Any] = orjson.loads(frame.partition("data: ")[2])["error"]
            return found
        return None

    def failed(self, failure: Failure) -> str:
        """The end of a stream that began well."""
        return errors.frame(failure)


#: A whole answer, or a stream's first frame and those to come, or an answer that comes before its work.
Begun = Response | tuple[Frame, Frames] | Detached


async def answer(request: Request, generation: Generation) -> Response:
    """Run the request, under its deadline and for as long as its client stays.

    A stream's status is sent with its first frame, so that an error before any token has a status of its own; or with a
    comment, where that takes long, for whoever closes silent connections.
    """
    services: Services = request.app.state.services
    tenant = getattr(request.state, "tenant", "")
    timings = Timings() if request.headers.get(HEADER) == "1" else None
    asked = RequestContext(
        request.state.request_id,
        deadline.of(request, services.settings.api.request_timeout_s),
        tenant,
        route_headers.session(request),
        route_headers.priority(request),
        timings=timings,
    )
    ticket = Ticket(services)
    try:
        body = await json_object(request, asked.deadline, generation.shape)
        context.enter(asked)
        begun = asyncio.create_task(_begin(services, asked, body, generation, request.scope))
        if not await unless_disconnected(request, begun, _patience(services, body.fields, generation)):
            return Stream(_late(begun, asked, ticket, generation), begun, asked, ticket)
        found = begun.result()
        explained = route_headers.explained(services.settings.api, request, asked.decisions)
        if isinstance(found, Response):
            await asked.close()
            found.headers.update(explained)
            if timings is not None:
                found.headers[HEADER] = timings.text()
            if is_large(found):
                return LargeAnswer(found, asked.deadline, ticket)
            ticket.close("ok")
            return found
        if isinstance(found, Detached):
            await services.background.start(found.id, _detached(found, asked, ticket))
            return Response(found.answer, media_type="application/json")
        ticket.first_frame()
        return Stream(_stream(*found, asked, ticket, generation), begun, asked, ticket, explained)
    except (ClientGone, ClientDisconnect):
        ticket.close("cancelled")
        await asked.close()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException as error:
        ticket.close(outcome_of(error))
        await asked.close()
        raise


def _patience(services: Services, body: dict[str, Any], generation: Generation) -> float | None:
    """How long a first frame may take before the stream begins without it, in seconds."""
    return services.settings.api.sse_keep_alive_s or None if generation.streams and body.get("stream") else None


async def _begin(services: Services, asked: RequestContext, body: Body, generation: Generation, scope: Scope) -> Begun:
    """How the answer begins."""
    await services.adapters.enter(asked, body.fields.get("model"))
    admission = await _come(asked, generation.admit(services, body, asked))
    asked.on_close.append(admission.release)
    body.forget_media()
    body_limit.relieve(scope, body.text_bytes)
    # Clients that send every field they know send null for "default".
    given = {name: value for name, value in body.fields.items() if value is not None}
    while True:  # each time with one medium less that may be gone
        try:
            return await _answered(services, asked, given, generation)
        except Exception as error:
            failure = as_failure(asked, error)
            told = failure_of(failure)
            if told.code != MediaExpired.code or not admission.borrows(told.param):
                raise failure from error
        log.info("request %s runs once more: a medium that it referred to is gone", asked.request_id)
        asked.failure = None
        await _come(asked, admission.renew(told.param))


async def _come(asked: RequestContext, media: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout(asked.deadline - time.time()):
            return await media
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed before its media had come") from None


async def _answered(services: Services, asked: RequestContext, body: dict[str, Any], generation: Generation) -> Begun:
    """The way to a stream's first frame tokenizes, as that to a whole answer does: nobody else limits that in time."""
    found = await deadline.within(asked.deadline, generation.run(services, body, asked.request_id))
    if isinstance(found, Detached | Response):
        return found
    if not isinstance(found, AsyncGenerator):
        return Response(generation.whole(found), media_type="application/json")
    first = await anext(found)
    if (error := generation.error_in(first)) is not None:
        await found.aclose()
        raise vllm_serving.ServingError(error)
    return first, found


async def _late(begun: asyncio.Task[Begun], asked: RequestContext, ticket: Ticket, generation: Generation) -> Frames:
    """A stream whose first frame took longer than its client's way here may be silent. Further comments are sent as in
    any silent stream (see KeepAlive)."""
    try:
        yield PING.decode()
        found = await begun
        assert isinstance(found, tuple), "it was asked for a stream"
        ticket.first_frame()
        async with aclosing(_stream(*found, asked, ticket, generation)) as stream:
            async for frame in stream:
                yield frame
    except Exception as error:
        failure = failure_of(as_failure(asked, error))
        ticket.close(failure.code)
        yield generation.failed(failure)


async def _detached(found: Detached, asked: RequestContext, ticket: Ticket) -> None:
    outcome = "cancelled"
    try:
        await found.run()
        outcome = "ok"
    except Exception as error:
        failure = failure_of(as_failure(asked, error))
        outcome = failure.code
        await found.failed(failure)
    finally:
        ticket.close(outcome)
        await to_the_end(asked.close())


async def _stream(
    first: Frame, frames: Frames, asked: RequestContext, ticket: Ticket, generation: Generation
) -> Frames:
    outcome = "cancelled"
    try:
        yield first
        async for frame in frames:
            if (found := generation.error_in(frame)) is not None:
                raise vllm_serving.ServingError(found)
            yield frame
        outcome = "ok"
    except Exception as error:
        failure = failure_of(as_failure(asked, error))
        outcome = failure.code
        yield generation.failed(failure)
    finally:
        ticket.close(outcome)
        await to_the_end(_leave(frames, asked))


async def _leave(frames: Frames, asked: RequestContext) -> None:
    try:
        await frames.aclose()
    finally:
        await asked.close()
