"""Celery task messages from an asyncio program, without blocking its loop.

`apply_async` blocks for as long as Redis hangs and costs three times as much. A worker cannot tell these messages from
Celery's own: message protocol 2 (https://docs.celeryq.dev/en/stable/internals/protocol.html) in kombu's Redis envelope.
"""

from __future__ import annotations

import base64
import os
import socket
import uuid
from datetime import UTC, datetime
from typing import Any

import orjson
from redis.exceptions import RedisError

from app import keys
from app.errors.serving import BrokerUnavailable
from app.messages.tasks import DecodeTask, EmbedTask, EncodeTask, PrefillTask, Task
from app.tick import Tick

ORIGIN = f"trivet-{os.getpid()}@{socket.gethostname()}"
_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def envelope(task: str, message: Task, queue: str, step: int = 0) -> bytes:
    """The message for a stage's task, which a worker drops unseen after its `expires_at`."""
    expires = datetime.fromtimestamp(message.expires_at, UTC).isoformat()
    return envelope_of(task, {"message": message.model_dump(mode="json")}, queue, summary(message), expires, step)


def envelope_of(
    task: str, kwargs: dict[str, Any], queue: str, summary: str, expires: str | None = None, step: int = 0
) -> bytes:
    """The message for any task. `summary` is what Flower shows instead of the arguments: never a prompt."""
    task_id = str(uuid.uuid4())
    body = orjson.dumps([[], kwargs, _EMBED])
    headers: dict[str, Any] = {
        "lang": "py", "task": task, "id": task_id, "shadow": None, "eta": None, "expires": expires,
        "group": None, "group_index": None, "retries": 0, "timelimit": [None, None], "root_id": task_id,
        "parent_id": None, "argsrepr": "()", "kwargsrepr": summary, "origin": ORIGIN, "ignore_result": True,
        "replaced_task_nesting": 0, "stamped_headers": None, "stamps": {},
    }  # fmt: skip
    properties = {
        "correlation_id": task_id, "reply_to": "", "delivery_mode": 2, "priority": step, "body_encoding": "base64",
        "delivery_info": {"exchange": "", "routing_key": queue}, "delivery_tag": str(uuid.uuid4()),
    }  # fmt: skip
    return orjson.dumps(
        {
            "body": base64.b64encode(body).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": headers,
            "properties": properties,
        }
    )


def opened(content: bytes) -> tuple[str, dict[str, Any]]:
    """(task, message) of an `envelope`. Raises ValueError, KeyError or TypeError if it is none."""
    outer = orjson.loads(content)
    _, kwargs, _ = orjson.loads(base64.b64decode(outer["body"]))
    return outer["headers"]["task"], kwargs["message"]


def summary(message: Task) -> str:
    """`request=... model=... prompt=83 tokens max=64`: short, and nothing that a user wrote."""
    about = f"request={message.request_id} model={message.model}"
    if isinstance(message, EncodeTask):
        return f"{about} {message.item.modality}={message.item.identity} bytes={message.item.size}"
    if isinstance(message, PrefillTask | DecodeTask):
        limit = message.params.get("max_tokens")
        return f"{about} prompt={len(message.prompt.token_ids)} tokens max={limit}"
    if isinstance(message, EmbedTask):
        return f"{about} prompt={len(message.prompt.token_ids)} tokens"
    return about


class TaskSender:
    """Sends tasks over one asyncio Redis client; all sends of one loop tick share a round trip."""

    def __init__(self, redis: Any) -> None:
        self._tick = Tick(redis)

    async def send(self, task: str, message: Task, queue: str, step: int = 0) -> None:
        """Return when Redis has the task. `step` is one of `keys.PRIORITY_STEPS`: those of the first are taken first.

        Raises BrokerUnavailable.
        """
        content = envelope(task, message, queue, step)
        try:
            await self._tick.run("LPUSH", keys.stepped(queue, step), content)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the task queue is not reachable ({type(error).__name__})") from error
