"""The Celery tasks: a stage each, with what all stages have in common around it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from celery import signals
from pydantic import ValidationError
from redis.exceptions import RedisError

from app import cancellation
from app.celery import DECODE_TASK, EMBED_TASK, ENCODE_TASK, PREFILL_TASK, app
from app.errors.base import TrivetError
from app.errors.serving import BrokerUnavailable, DeadlineExceeded, EngineFailed, WorkerLost
from app.messages.deltas import Delta
from app.messages.tasks import DecodeTask, EmbedTask, EncodeTask, PrefillTask, StageTask, Task
from app.routing import encode_place
from workers import bootstep, configure
from workers.aiotask import AioTask
from workers.host import Host, current
from workers.stages import decode as decode_stage
from workers.stages import embed as embed_stage
from workers.stages import encode as encode_stage
from workers.stages import prefill as prefill_stage

log = logging.getLogger(__name__)

T = TypeVar("T", bound=StageTask)
M = TypeVar("M", bound=Task)
Stage = Callable[[Host, T], Awaitable[None]]

bootstep.install(app)
signals.celeryd_init.connect(configure.configure)


@app.task(base=AioTask, name=ENCODE_TASK)  # type: ignore[untyped-decorator]
async def encode(message: dict[str, Any]) -> None:
    """Run an EncodeTask: encode an item and announce it. Requests hear of it through the announcement alone."""
    host = current()
    task = _parse(host, EncodeTask, message)
    if task is None:
        return
    # An item that is being encoded is of use to others, so the end of its request does not end it.
    with host.jobs.running(encode_place(task.request_id, task.item.identity), task.api):
        await encode_stage.run(host, task, lambda: _is_over(host, task))


@app.task(base=AioTask, name=PREFILL_TASK)  # type: ignore[untyped-decorator]
async def prefill(message: dict[str, Any]) -> None:
    """Run a PrefillTask: fill the KV cache with the prompt and enqueue the decode task."""
    await _serve(PrefillTask, message, prefill_stage.run, prefill_stage.refuse)


@app.task(base=AioTask, name=DECODE_TASK)  # type: ignore[untyped-decorator]
async def decode(message: dict[str, Any]) -> None:
    """Run a DecodeTask: generate, and stream the deltas to the API process that asked."""
    await _serve(DecodeTask, message, decode_stage.run, decode_stage.refuse)


@app.task(base=AioTask, name=EMBED_TASK)  # type: ignore[untyped-decorator]
async def embed(message: dict[str, Any]) -> None:
    """Run an EmbedTask: make the prompt's vector, and send it to the API process that asked."""
    await _serve(EmbedTask, message, embed_stage.run, embed_stage.refuse)


async def _serve(kind: type[T], message: dict[str, Any], stage: Stage[T], refuse: Stage[T]) -> None:
    """Run the stage, if the message is one of its tasks."""
    host = current()
    task = _parse(host, kind, message)
    if task is not None:
        await _run(host, task, stage, refuse)


def _parse(host: Host, kind: type[M], message: dict[str, Any]) -> M | None:
    """The validated message; None, with an answer to the API where one can be given, if it is not one."""
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        details = [(one["loc"], one["type"]) for one in error.errors(include_input=False, include_url=False)]
        log.error("a %s message that is none (another version of Trivet?): %s", kind.__name__, details)
        request_id, api = message.get("request_id"), message.get("api")
        if isinstance(request_id, str) and isinstance(api, str):
            failure = EngineFailed("the worker does not understand the task; are all parts of one version?")
            host.tokens.put(api, Delta(request=request_id, attempt=0, seq=0, error=failure.failure()))
        return None


async def _is_over(host: Host, task: Task) -> bool:
    """Cancelled, or past its deadline, while it waited in the queue."""
    try:
        return time.time() >= task.deadline or await cancellation.is_cancelled(host.cache, task.request_id)
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(f"the worker's Redis did not answer ({type(error).__name__})") from error


async def _run(host: Host, task: T, stage: Stage[T], refuse: Stage[T]) -> None:
    """Run the stage within the deadline; a cancelled request needs no answer, a failed one gets its error."""
    begun = False
    # First among the jobs, then the look at the tombstone: a cancellation that comes between finds one of the two.
    with host.jobs.running(task.request_id, task.api):
        try:
            if await _is_over(host, task):
                return
            with host.using(task):
                begun = True
                async with asyncio.timeout(task.deadline - time.time()):
                    await stage(host, task)
        except asyncio.CancelledError:
            if not host.jobs.was_cancelled(task.request_id):
                _fail(host, task, WorkerLost("the worker is shutting down"))
                raise
            log.info("request %s cancelled", task.request_id)
            # Its API process may be the one that is gone.
            await host.unplace(task)
        except TimeoutError:
            _fail(host, task, DeadlineExceeded("the request's deadline passed"))
        except TrivetError as error:
            log.info("request %s: %s: %s", task.request_id, error.code, error.message)
            _fail(host, task, error)
        except Exception as error:
            log.exception("request %s failed", task.request_id)
            _fail(host, task, EngineFailed(f"the worker failed ({type(error).__name__}; see its log)"))
        finally:
            if not begun:
                await refuse(host, task)


#: Sequence number of an error delta: beyond any that a stage uses, so that it is never taken for a duplicate.
ERROR_SEQ = 1 << 31


def _fail(host: Host, task: StageTask, error: TrivetError) -> None:
    """Answer with the error, which ends the request whatever came before."""
    delta = Delta(request=task.request_id, attempt=task.attempt, seq=ERROR_SEQ, error=error.failure())
    host.tokens.put(task.api, delta)
