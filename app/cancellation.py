"""Stopping a request wherever it is: a message to the worker that runs it, a tombstone for the one that has yet to."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from redis.exceptions import RedisError

from app import keys
from app.redis import subscription

log = logging.getLogger(__name__)


async def cancel(redis: Any, request_id: str, ttl_s: float = keys.CANCELLED_TTL_S) -> None:
    """Tell every worker to drop the request. The tombstone comes first, so that no task can slip between.

    It stays for `ttl_s`, which has to be longer than a task of the request can wait in a queue.
    """
    pipe = redis.pipeline(transaction=False)
    pipe.set(keys.cancelled(request_id), "1", ex=math.ceil(max(ttl_s, keys.CANCELLED_TTL_S)))
    pipe.publish(keys.CANCEL_CHANNEL, request_id)
    await pipe.execute()


async def is_cancelled(redis: Any, request_id: str) -> bool:
    return bool(await redis.exists(keys.cancelled(request_id)))


async def listen(redis: Any, on_cancel: Callable[[str], None], running: Callable[[], list[str]]) -> None:
    """Call `on_cancel` for every cancelled request, for ever.

    A message that is lost while the connection is down is made up for: whenever the subscription has been made (again),
    the tombstones of all `running` requests are read.
    """
    while True:
        try:
            async with aclosing(subscription(redis, keys.CANCEL_CHANNEL)) as messages:
                async for message in messages:
                    if message is None:
                        await _catch_up(redis, on_cancel, running())
                    else:
                        on_cancel(message.decode(errors="replace"))
        except (RedisError, OSError) as error:
            log.warning("cancel channel lost, subscribing again: %s", error)
            await asyncio.sleep(0.5)


async def _catch_up(redis: Any, on_cancel: Callable[[str], None], running: list[str]) -> None:
    if not running:
        return
    for request_id, mark in zip(running, await redis.mget([keys.cancelled(one) for one in running]), strict=True):
        if mark is not None:
            on_cancel(request_id)
