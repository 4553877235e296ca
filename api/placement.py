"""Where a job goes: among which workers the router chooses, and what it is told of the job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from api.job import Job
from app.errors.base import TrivetError
from app.errors.requests import WrongEndpoint
from app.fleet import FleetView
from app.items.index import ItemIndex
from app.registry import Fleet
from app.roles import Does
from app.routing import Ask, Decision, Explanation, Router, View
from app.routing.view import Views

log = logging.getLogger(__name__)


class Placement:
    """Asks the router for a model's jobs, in the name of this API process."""

    def __init__(self, api: str, model: str, fleet: FleetView, router: Router, items: ItemIndex) -> None:
        self._api = api
        self._model = model
        self._fleet = fleet
        self._router = router
        self._views = Views(items)
        self._items = items

    async def decide(self, job: Job, give_back: Callable[[Decision], None]) -> Decision:
        """Choose, and take the place. Raises NoWorker, AdapterMissing, WrongEndpoint or BrokerUnavailable.

        `give_back` hears of a place that was taken after the caller had been cancelled: nobody else knows where.
        """
        planning = asyncio.create_task(self._router.plan(await self._left(job), await self._ask(job)))

        def too_late(done: asyncio.Task[Decision]) -> None:
            if not done.cancelled() and done.exception() is None:
                give_back(done.result())

        try:
            decision = await asyncio.shield(planning)
        except asyncio.CancelledError:
            planning.add_done_callback(too_late)
            raise
        if job.on_decision is not None:
            job.on_decision(decision)
        return decision

    async def explain(self, job: Job) -> Explanation:
        """Where the job would go now, and why."""
        return await self._router.explain(await self._left(job), await self._ask(job))

    async def _left(self, job: Job) -> Fleet:
        """The workers that hold the job's adapter and have not failed it: they may still be registered. Those that
        have, too, if it cannot do without. Raises AdapterMissing, and WrongEndpoint where none of them does this."""
        media = bool(job.prompt.media)
        everybody = await self._fleet.holding(job.adapter, lambda fleet: not fleet.missing(media))
        fleet = everybody.doing(job.does)
        if everybody.workers and not fleet.workers:
            raise WrongEndpoint(f"the workers of {self._model} do not {job.does}; do all parts have the same settings?")
        left = fleet.without(job.lost)
        return fleet if left.missing(media) else left

    async def _view(self, job: Job) -> View:
        """Trouble with the view of a prompt is none of the prompt's: then it goes by load. What embeds always does."""
        if job.does is Does.EMBED:
            return View(tokens=len(job.prompt.token_ids))
        try:
            return await self._views.of(job.prompt, self._fleet.now, job.adapter)
        except TrivetError:
            raise
        except Exception:
            log.exception("request %s is placed without a view of its prompt", job.request_id)
            return View(tokens=len(job.prompt.token_ids), exact=False)

    async def _ask(self, job: Job) -> Ask:
        return Ask(
            request_id=job.request_id,
            deadline=job.deadline,
            owner=self._api,
            items=tuple(dict.fromkeys(ref.identity for ref in job.prompt.media)),
            fingerprint=self._items.namespace,
            view=await self._view(job),
            max_tokens=1 if job.does is Does.EMBED else job.params.get("max_tokens") or 0,
            session=job.session,
            tenant=job.tenant,
            priority=job.priority,
            adapter=job.adapter,
        )
