"""The tasks of a job that has its place, each to the queue of the worker that was chosen for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

from api.job import Job
from app import keys
from app.celery import DECODE_TASK, EMBED_TASK, ENCODE_TASK, PREFILL_TASK
from app.errors.media import MediaExpired
from app.errors.serving import BrokerUnavailable
from app.items.index import ItemIndex
from app.messages.plans import Plan
from app.messages.tasks import DecodeTask, EmbedTask, EncodeTask, PrefillTask
from app.roles import Does, Role
from app.routing import Decision
from app.sender import TaskSender

log = logging.getLogger(__name__)


class Dispatch:
    """Sends the tasks of a model's jobs, in the name of this API process."""

    def __init__(self, api: str, model: str, sender: TaskSender, items: ItemIndex) -> None:
        self._api = api
        self._model = model
        self._sender = sender
        self._items = items

    async def send(self, job: Job, decision: Decision) -> None:
        """All at once: the items' encode tasks, and the task that waits for them.

        Raises BrokerUnavailable, or MediaExpired for an item that nobody can encode: then `unclaim` the plan.
        """
        known = {
            "request_id": job.request_id,
            "attempt": 0,
            "api": self._api,
            "model": self._model,
            "deadline": job.deadline,
        }
        _check_sources(job, decision.plan)
        encodes = [*self._encodes(job, decision.plan, known)]
        first = self._first_stage(job, decision, known)
        if encodes:
            await asyncio.gather(*encodes, first)
        else:
            await first

    def _encodes(self, job: Job, plan: Plan, known: dict[str, Any]) -> Iterator[Coroutine[Any, Any, None]]:
        media = {ref.identity: ref for ref in job.prompt.media}
        for identity, worker in plan.encode.items():
            task = EncodeTask(item=media[identity], assigned=worker, **known)
            yield self._sender.send(ENCODE_TASK, task, keys.worker_queue(Role.ENCODE, worker.worker))

    def _first_stage(self, job: Job, decision: Decision, known: dict[str, Any]) -> Coroutine[Any, Any, None]:
        plan = decision.plan
        common = known | {
            "prompt": job.prompt,
            "plan": plan,
            "params": job.params,
            "priority": job.priority,
            "session": job.session,
            "tenant": job.tenant,
            "adapter": job.adapter,
            "avoid": list(job.lost),
            "reasoning_ended": job.reasoning_ended,
            "reasoning_parser_kwargs": job.reasoning_parser_kwargs,
            "timings": job.on_plan is not None,
        }
        if plan.aggregated:
            queue = keys.worker_queue(Role.DECODE, plan.prefill.worker)
            if job.does is Does.EMBED:
                return self._sender.send(EMBED_TASK, EmbedTask(**common), queue, decision.step)
            return self._sender.send(DECODE_TASK, DecodeTask(**common), queue, decision.step)
        queue = keys.worker_queue(Role.PREFILL, plan.prefill.worker)
        return self._sender.send(PREFILL_TASK, PrefillTask(**common), queue, decision.step)

    async def unclaim(self, plan: Plan) -> None:
        """Nobody was told to encode the plan's items: others that want them must not wait."""
        for identity, worker in plan.encode.items():
            try:
                await self._items.give_up(identity, worker)
            except BrokerUnavailable as error:
                log.warning("item %s stays claimed until the claim runs out: %s", identity, error)


def _check_sources(job: Job, plan: Plan) -> None:
    """Raise MediaExpired for an item that has to be encoded, and was only referred to: its embedding is gone."""
    for ref in job.prompt.media:
        if ref.source is None and ref.identity in plan.encode:
            raise MediaExpired("a medium was gone before a worker read it; send the request again", param=ref.param)
