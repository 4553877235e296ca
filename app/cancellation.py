"""Stopping a request wherever it is: a message to the worker that runs it, and a tombstone for the one that has yet to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from app import keys

log = logging.getLogger(__name__)


async def cancel(redis: Any, request_id: str) -> None:
    """Tell every worker to drop the request. The tombstone comes first, so that no task can slip between."""
    pipe = redis.pipeline(transaction=False)
    pipe.set(keys.cancelled(request_id), "1", ex=keys.CANCELLED_TTL_S)
    pipe.publish(keys.CANCEL_CHANNEL, request_id)
    await pipe.execute()


async def is_cancelled(redis: Any, request_id: str) -> bool:
    return bool(await redis.exists(keys.cancelled(request_id)))


async def listen(redis: Any, on_cancel: Callable[[str], None], running: Callable[[], list[str]]) -> None:
    """Call `on_cancel` for every cancelled request, for ever.

    A message that is lost while the connection is down is made up for: after a reconnect the tombstones of all `running`
    requests are read.
    """
    while True:
        try:
            async with redis.pubsub(ignore_subscribe_messages=True) as subscription:
                await subscription.subscribe(keys.CANCEL_CHANNEL)
                await _catch_up(redis, on_cancel, running())
                while True:
                    message = await subscription.get_message(timeout=4.0)
                    if message is not None:
                        on_cancel(message["data"].decode())
        except (RedisError, OSError) as error:
            log.warning("cancel channel lost, subscribing again: %s", error)
            await asyncio.sleep(0.5)


async def _catch_up(redis: Any, on_cancel: Callable[[str], None], running: list[str]) -> None:
    if not running:
        return
    for request_id, mark in zip(running, await redis.mget([keys.cancelled(one) for one in running]), strict=True):
        if mark is not None:
            on_cancel(request_id)
