"""Encode: one item through the processor and the encoder, into the store, and known to the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from app.errors.base import TrivetError
from app.errors.serving import EncodeFailed
from app.messages.tasks import EncodeTask
from workers.host import Host

if TYPE_CHECKING:
    from workers.items.arrivals import Arrival

log = logging.getLogger(__name__)


async def run(host: Host, task: EncodeTask, is_over: Callable[[], Awaitable[bool]]) -> None:
    """Whoever waits for the item hears of it, whichever way this ends. `is_over` is about the task's request."""
    assert host.items is not None
    identity = task.item.identity
    try:
        # A claim of another incarnation is for those who wait to notice.
        if task.assigned == host.me:
            # Of tasks for one item the first encodes, and the others find it here or the claim gone.
            async with host.items.encoder.lock(identity), host.items.encoder.slots:
                with host.items.encoder.arrivals.arrival() as arrival:
                    await _answer(host, task, is_over, arrival)
    finally:
        await host.unplace(task, identity)


async def refuse(host: Host, task: EncodeTask, error: TrivetError) -> None:
    """Let others look for another way."""
    if host.items is not None:
        await host.items.encoder.give_up(task.item.identity, error.failure())


async def _answer(host: Host, task: EncodeTask, is_over: Callable[[], Awaitable[bool]], arrival: Arrival) -> None:
    assert host.items is not None
    identity, leave = task.item.identity, host.items.encoder.leave
    try:
        # An item that is being encoded is of use to others: it has its own time, and not what its request has left.
        async with asyncio.timeout(host.settings.items.encode_timeout_s):
            if await is_over():
                leave(identity, None)
            elif await host.items.index.owns(identity, host.me):
                await _encode(host, task, arrival)
    except TimeoutError:
        log.warning("item %s of request %s was not encoded in time", identity, task.request_id)
        leave(identity, EncodeFailed("the item was not encoded in time"))
    except TrivetError as error:
        log.info("item %s of request %s: %s: %s", identity, task.request_id, error.code, error.message)
        leave(identity, error)
    except BaseException as error:
        leave(identity, error)
        raise


async def _encode(host: Host, task: EncodeTask, arrival: Arrival) -> None:
    assert host.items is not None
    encoder, local = host.items.encoder, host.items.local
    here = local.get(task.item.identity)
    if here is not None:
        # The index had lost it.
        await local.published.publish(here)
        local.room.keep_until_taken(task.item.identity)
    else:
        own = await encoder.prepare(task.item)
        async with encoder.reserving(own, arrival, host.settings.items.encode_timeout_s):
            if own.reserved:
                await host.engine.encode(own.alone, f"{task.request_id}:{task.item.identity}")
            await encoder.announce(own)
            # Others are about to read it.
            local.room.keep_until_taken(task.item.identity)
