"""A request whose worker died, or let its adapter go, is placed anew while nothing of its answer has been sent."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from api.job import Job
from app.errors.adapters import AdapterMissing
from app.errors.base import RemoteFailure
from app.errors.serving import WorkerLost
from app.messages.deltas import Delta

log = logging.getLogger(__name__)

Deltas = AsyncGenerator[list[Delta], None]

#: What another worker may make good: this one died, or does not hold the request's adapter any more.
ELSEWHERE = frozenset({WorkerLost.code, AdapterMissing.code})


async def migrating(run: Callable[[Job], Deltas], job: Job, limit: int) -> Deltas:
    """The job's deltas; up to `limit` times from another worker. Raises as `run` does.

    A job goes by another name each time: what is left of the last one, its tasks and its tombstone, is not its own.
    """
    for left in reversed(range(limit + 1)):
        answered = False
        try:
            async with aclosing(run(job)) as steps:
                async for deltas in steps:
                    answered = True
                    yield deltas
                return
        except RemoteFailure as error:
            if answered or not left or error.code not in ELSEWHERE:
                raise
            log.warning("request %s is placed anew: %s", job.request_id, error.message)
        job = replace(job, request_id=f"{job.request_id}~")
