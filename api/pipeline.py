"""From a rendered request to its tokens: plan, send, read, and clean up whatever way it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from app import cancellation, keys
from app.celery import DECODE_TASK, ENCODE_TASK, PREFILL_TASK
from app.errors import BrokerUnavailable, DeadlineExceeded, MediaExpired, RemoteFailure, WorkerLost
from app.fleet import FleetView
from app.items.index import ItemIndex
from app.messages import Assignment, DecodeTask, Delta, EncodeTask, Plan, PrefillTask, Prompt
from app.roles import Role
from app.routing import Ask, Router
from app.sender import TaskSender
from app.streaming import RequestStream, TokenReader

log = logging.getLogger(__name__)

#: How long the clean-up after a request is tried again while Redis is away.
CLEAN_UP_FOR_S = 30.0


@dataclass(frozen=True)
class Job:
    """A request to run. `params` is vLLM's SamplingParams as builtins; `deadline` is in unix seconds."""

    request_id: str
    prompt: Prompt
    params: dict[str, Any]
    deadline: float
    priority: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


class Pipeline:
    """Runs jobs. Knows routers, queues and token streams; neither HTTP nor vLLM."""

    def __init__(
        self,
        api: str,
        model: str,
        fleet: FleetView,
        router: Router,
        sender: TaskSender,
        reader: TokenReader,
        items: ItemIndex,
        redis: Any,
    ) -> None:
        self._api = api
        self._model = model
        self._fleet = fleet
        self._router = router
        self._sender = sender
        self._reader = reader
        self._items = items
        self._redis = redis
        self._ending: set[asyncio.Task[None]] = set()

    async def stream(self, job: Job) -> AsyncGenerator[list[Delta], None]:
        """The job's deltas, in order; several at once when the reader has fallen behind.

        Raises NoWorker, BrokerUnavailable, MediaExpired, or RemoteFailure with whatever ended the job. A caller that
        stops early cancels it.
        """
        plan = await self._plan(job)
        stream = self._reader.open(job.request_id, 0, frozenset(plan.workers))
        overdue = DeadlineExceeded("the request's deadline passed").failure()
        timer = asyncio.get_running_loop().call_later(max(0.0, job.deadline - time.time()), stream.fail, overdue)
        done = False
        try:
            for gone in filter(self._fleet.is_lost, plan.workers):
                self.worker_lost(gone)  # while it was chosen
            await self._send(job, plan)
            while not done:
                deltas = await stream.get()
                failure = deltas.pop().error if deltas[-1].error is not None else None
                done = self._note(stream, plan, deltas)
                if deltas:
                    yield deltas
                if failure is not None:
                    raise RemoteFailure(failure)
        finally:
            timer.cancel()
            self._reader.close(job.request_id)
            self._spawn(self._end(plan, job, cancel=not done))

    async def _plan(self, job: Job) -> Plan:
        items = tuple(dict.fromkeys(ref.identity for ref in job.prompt.media))
        ask = Ask(job.request_id, job.deadline, items, self._items.namespace)
        planning = asyncio.create_task(self._router.plan(self._fleet.now, ask))

        def give_back(done: asyncio.Task[Plan]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._spawn(self._end(done.result(), job, cancel=False))
                self._spawn(self._unclaim(done.result()))

        try:
            return await asyncio.shield(planning)
        except asyncio.CancelledError:
            # The place may be taken by now, and nobody else would know where.
            planning.add_done_callback(give_back)
            raise

    def worker_lost(self, gone: Assignment) -> None:
        """End the streams that still depend on this worker."""
        failure = WorkerLost(f"the worker {gone.worker} that ran the request died").failure()
        for stream in self._reader.streams:
            if gone in stream.workers:
                stream.fail(failure)

    async def settle(self, timeout_s: float) -> None:
        """Wait for the clean-up of ended jobs."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=timeout_s)

    def _note(self, stream: RequestStream, plan: Plan, deltas: list[Delta]) -> bool:
        """Whether these are the last. Once the decode worker speaks, nobody else matters any more."""
        if deltas and not plan.aggregated and len(stream.workers) > 1:
            stream.workers = frozenset({plan.decode})
        return bool(deltas) and deltas[-1].final

    async def _send(self, job: Job, plan: Plan) -> None:
        """All at once: the items' encode tasks, and the task that waits for them."""
        known = {
            "request_id": job.request_id,
            "attempt": 0,
            "api": self._api,
            "model": self._model,
            "deadline": job.deadline,
        }
        try:
            _check_sources(job, plan)
            await asyncio.gather(*(self._encodes(job, plan, known)), self._first_stage(job, plan, known))
        except (BrokerUnavailable, MediaExpired):
            self._spawn(self._unclaim(plan))
            raise

    def _encodes(self, job: Job, plan: Plan, known: dict[str, Any]) -> Iterator[Coroutine[Any, Any, None]]:
        media = {ref.identity: ref for ref in job.prompt.media}
        for identity, worker in plan.encode.items():
            task = EncodeTask(item=media[identity], assigned=worker, **known)
            yield self._sender.send(ENCODE_TASK, task, keys.worker_queue(Role.ENCODE, worker.worker))

    def _first_stage(self, job: Job, plan: Plan, known: dict[str, Any]) -> Coroutine[Any, Any, None]:
        common = known | {
            "prompt": job.prompt,
            "plan": plan,
            "params": job.params,
            "priority": job.priority,
            "reasoning_ended": job.reasoning_ended,
            "reasoning_parser_kwargs": job.reasoning_parser_kwargs,
        }
        if plan.aggregated:
            queue = keys.worker_queue(Role.DECODE, plan.decode.worker)
            return self._sender.send(DECODE_TASK, DecodeTask(**common), queue)
        queue = keys.worker_queue(Role.PREFILL, plan.prefill.worker)
        return self._sender.send(PREFILL_TASK, PrefillTask(**common), queue)

    async def _unclaim(self, plan: Plan) -> None:
        """Nobody was told to encode the plan's items: others that want them must not wait."""
        for identity, worker in plan.encode.items():
            try:
                await self._items.give_up(identity, worker)
            except BrokerUnavailable as error:
                log.warning("item %s stays claimed until the claim runs out: %s", identity, error)

    async def _end(self, plan: Plan, job: Job, *, cancel: bool) -> None:
        """Clean up, trying again while Redis is away: what it may have queued must not run for nobody."""
        until = time.monotonic() + CLEAN_UP_FOR_S
        while True:
            try:
                if cancel:
                    await cancellation.cancel(self._redis, job.request_id, job.deadline - time.time())
                return await self._router.release(plan, job.request_id)
            except (RedisError, OSError) as error:
                if time.monotonic() >= until:
                    log.error("request %s was not cleaned up and ends with its deadline: %s", job.request_id, error)
                    return
            await asyncio.sleep(0.5)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _check_sources(job: Job, plan: Plan) -> None:
    """Raise MediaExpired for an item that has to be encoded, and was only referred to: its embedding is gone."""
    for ref in job.prompt.media:
        if ref.source is None and ref.identity in plan.encode:
            raise MediaExpired("a medium was gone before a worker read it; send the request again", param=ref.param)
