"""What comes to the queues of a worker that takes no more: an answer at once, instead of silence until it is gone.

An API process may still choose a worker for half a second after it began to drain, and decode tasks are on their way
for as long as prefills run.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError
from redis.exceptions import RedisError

from app import keys, sender
from app.celery import DECODE_TASK, ENCODE_TASK
from app.errors.serving import WorkerLost
from app.messages.deltas import Delta
from app.messages.tasks import DecodeTask, EncodeTask
from workers.host import Host
from workers.stages import decode, encode

log = logging.getLogger(__name__)


async def turn_away(host: Host) -> None:
    """Empty this worker's own queues; each request is told that its worker went away, and may be sent again."""
    for role in host.settings.roles:
        for name in keys.lists(keys.worker_queue(role, host.id)):
            while (content := await _next(host, name)) is not None:
                await _answer(host, content)


async def _next(host: Host, queue: str) -> bytes | None:
    try:
        content = await host.broker.rpop(queue)
    except (RedisError, OSError) as error:
        log.warning("queue %s cannot be emptied: %s", queue, error)
        return None
    return content if isinstance(content, bytes) else None


async def _answer(host: Host, content: bytes) -> None:
    try:
        task, message = sender.opened(content)
        request_id, api = str(message["request_id"]), str(message["api"])
    except (ValueError, KeyError, TypeError) as error:
        log.error("a message that is none in a queue of this worker: %s", error)
        return
    lost = WorkerLost("the worker is shutting down")
    if task == ENCODE_TASK:
        return await _leave_to_others(host, message, lost)
    host.tokens.put(api, Delta(request=request_id, attempt=int(message.get("attempt", 0)), seq=0, error=lost.failure()))
    if task == DECODE_TASK:
        await _give_back(host, message)


async def _leave_to_others(host: Host, message: dict[str, Any], lost: WorkerLost) -> None:
    try:
        await encode.refuse(host, EncodeTask.model_validate(message), lost)
    except ValidationError as error:
        log.error("an encode message that is none, with %d errors", error.error_count())


async def _give_back(host: Host, message: dict[str, Any]) -> None:
    try:
        await decode.refuse(host, DecodeTask.model_validate(message))
    except ValidationError as error:
        log.error("a decode message that is none, with %d errors", error.error_count())
