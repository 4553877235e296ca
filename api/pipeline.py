"""From a rendered request to its tokens: plan, send, read, and clean up whatever way it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from api.dispatch import Dispatch
from api.job import Job
from api.migration import ELSEWHERE, migrating
from api.placement import Placement
from app import cancellation
from app.errors.base import Failure, RemoteFailure
from app.errors.media import MediaExpired
from app.errors.serving import BrokerUnavailable, DeadlineExceeded, WorkerLost
from app.fleet import FleetView
from app.items.index import ItemIndex
from app.messages.deltas import Delta
from app.messages.plans import Assignment, Plan
from app.routing import Decision, Explanation, Reservations, Router
from app.sender import TaskSender
from app.streaming import RequestStream, TokenReader

log = logging.getLogger(__name__)

#: How long the clean-up after a request is tried again while Redis is away.
CLEAN_UP_FOR_S = 30.0


class Pipeline:
    """Runs jobs. Knows routers, queues and token streams; neither HTTP nor vLLM."""

    def __init__(
        self,
        api: str,
        model: str,
        fleet: FleetView,
        router: Router,
        reservations: Reservations,
        sender: TaskSender,
        reader: TokenReader,
        items: ItemIndex,
        redis: Any,
        migration_limit: int,
    ) -> None:
        self._api = api
        self._fleet = fleet
        self._placement = Placement(api, model, fleet, router, items)
        self._reservations = reservations
        self._dispatch = Dispatch(api, model, sender, items)
        self._reader = reader
        self._redis = redis
        self._migration_limit = migration_limit
        self._ending: set[asyncio.Task[None]] = set()

    def stream(self, job: Job) -> AsyncGenerator[list[Delta], None]:
        """The job's deltas, in order; several at once when the reader has fallen behind.

        Raises NoWorker, BrokerUnavailable, MediaExpired, or RemoteFailure with whatever ended the job. A caller that
        stops early cancels it.
        """
        return migrating(self._run, job, self._migration_limit)

    async def _run(self, job: Job) -> AsyncGenerator[list[Delta], None]:
        """Once, on the workers that are chosen now."""
        decision = await self._placement.decide(job, partial(self._give_back, job))
        plan = decision.plan
        if job.on_plan is not None:
            job.on_plan(plan)
        stream = self._reader.open(job.request_id, 0, frozenset(plan.workers))
        overdue = DeadlineExceeded("the request's deadline passed").failure()
        timer = asyncio.get_running_loop().call_later(max(0.0, job.deadline - time.time()), stream.fail, overdue)
        done = False
        try:
            for gone in filter(self._fleet.is_lost, plan.workers):
                self.worker_lost(gone)  # while it was chosen
            await self._send(job, decision)
            answered = False
            while not done:
                deltas = await stream.get()
                failure = deltas.pop().error if deltas[-1].error is not None else None
                done = bool(deltas) and deltas[-1].final
                if not answered and deltas and deltas[-1].answers:
                    answered = True
                    self._answering(job, plan, stream, done)
                if deltas:
                    yield deltas
                if failure is not None:
                    if failure.code in ELSEWHERE:
                        job.lost.update(stream.workers)
                    raise RemoteFailure(failure)
        finally:
            timer.cancel()
            self._reader.close(job.request_id)
            self._spawn(self._end(job, cancel=not done))

    async def explain(self, job: Job) -> Explanation:
        """Where the job would go now, and why."""
        return await self._placement.explain(job)

    def worker_lost(self, gone: Assignment) -> None:
        """End the streams that still depend on this worker."""
        failure = WorkerLost(f"the worker {gone.worker} that ran the request died").failure()
        for stream in self._reader.streams:
            if gone in stream.workers:
                stream.fail(failure)
        self._spawn(self._fail_placed(gone, failure))

    async def settle(self, timeout_s: float) -> None:
        """Wait for the clean-up of ended jobs."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=timeout_s)

    async def leave(self) -> None:
        """Leave no reservation behind. Raises RedisError or OSError."""
        await self._reservations.leave(self._api)

    async def keep_reservations(self) -> None:
        """Give back what nobody else will: places of API processes that died, and of requests that nobody runs here."""
        await self._reservations.reap()
        await self._reservations.sweep(self._api, [stream.request_id for stream in self._reader.streams])

    async def _fail_placed(self, gone: Assignment, failure: Failure) -> None:
        """End the streams of requests that were handed over to it and of which it has not spoken."""

        async def fail() -> None:
            placed = set(await self._reservations.placed_on(self._api, gone))
            for stream in self._reader.streams:
                if stream.request_id in placed:
                    stream.fail(failure)

        await _insist(fail, f"what was placed on {gone.worker} is not known, and ends with its deadline")

    def _answering(self, job: Job, plan: Plan, stream: RequestStream, done: bool) -> None:
        """The first token is here: who decodes is known, and what was to prefill is done. With the last one here, too,
        its place is given back as a whole."""
        if plan.aggregated:
            if not done:
                self._spawn(self._note_prefilled(job))
        elif job.on_plan is not None:
            (decoder,) = stream.workers
            job.on_plan(plan.model_copy(update={"decode": decoder}))

    async def _note_prefilled(self, job: Job) -> None:
        try:
            await self._reservations.prefilled(self._api, job.request_id)
        except (RedisError, OSError) as error:
            log.warning("request %s counts as one to prefill until it ends: %s", job.request_id, error)

    async def _send(self, job: Job, decision: Decision) -> None:
        try:
            await self._dispatch.send(job, decision)
        except (BrokerUnavailable, MediaExpired, asyncio.CancelledError):
            self._spawn(self._dispatch.unclaim(decision.plan))
            raise

    def _give_back(self, job: Job, late: Decision) -> None:
        """The place was taken for a caller who had left."""
        self._spawn(self._end(job, cancel=False))
        self._spawn(self._dispatch.unclaim(late.plan))

    async def _end(self, job: Job, *, cancel: bool) -> None:
        """Clean up: what may be queued must not run for nobody."""

        async def clean() -> None:
            if cancel:
                await cancellation.cancel(self._redis, job.request_id, job.deadline - time.time())
            await self._reservations.release(self._api, job.request_id)

        await _insist(clean, f"request {job.request_id} was not cleaned up and ends with its deadline")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _insist(act: Callable[[], Awaitable[None]], otherwise: str) -> None:
    """Try until Redis answers, for `CLEAN_UP_FOR_S`; then say what follows from it."""
    until = time.monotonic() + CLEAN_UP_FOR_S
    while True:
        try:
            return await act()
        except (RedisError, OSError) as error:
            if time.monotonic() >= until:
                log.error("%s: %s", otherwise, error)
                return
        await asyncio.sleep(0.5)
