"""Decisions by scripts in Redis, so that all API processes and prefill workers see the same loads.

The cost of a candidate is in KV blocks, after Dynamo's (https://docs.nvidia.com/dynamo: KV cache routing):

    to prefill = (prompt - overlap_credit * overlap) + queue_weight * what others have yet to prefill there
    prefill_load_scale * to prefill + blocks of the requests placed there and of this one
        + active_request_weight * requests placed there + embedding_weight * MiB of embeddings to fetch
        + adapter_weight * (1 + adapters on the device / max_loras) where the request's adapter is not among them

and that of a decode worker has `transfer_weight` * (prompt - overlap_credit * overlap) in the first one's place. The
overlap is the longest prefix of the prompt that is held there, or that prompts lately sent there have in common with
it. Among equals one is taken by chance.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from redis.exceptions import ResponseError

from app import keys
from app.errors.serving import NoWorker
from app.messages.plans import Assignment, Plan
from app.redis import needed
from app.registry import Fleet
from app.roles import Role
from app.routing.asking import Asking
from app.routing.base import Ask, Decision, Explanation
from app.routing.lua import BY_COST, HAND_OFF, PLACE
from app.scripts import Script
from app.settings_sections import Policy, RoutingSettings
from app.tick import Tick

log = logging.getLogger(__name__)

Json = dict[str, Any]
Scripts = Mapping[Policy, Script]


class RedisRouter:
    """A `Router`. `redis` is an asyncio client, `claim_s` how long an encode worker has for an item.

    A decision that takes longer than `settings.timeout_s`, or that fails, becomes one for the least loaded worker.
    """

    def __init__(self, redis: Any, settings: RoutingSettings, claim_s: float) -> None:
        self._tick = Tick(redis)
        self._settings = settings
        self._asking = Asking(settings, claim_s)
        self._turns = itertools.count(1)

    async def plan(self, fleet: Fleet, ask: Ask) -> Decision:
        _refuse_missing(fleet, ask)
        return await self._first(fleet, ask, dry=False)

    async def explain(self, fleet: Fleet, ask: Ask) -> Explanation:
        _refuse_missing(fleet, ask)
        return (await self._first(fleet, ask, dry=True)).reasons

    async def hand_off(self, fleet: Fleet, ask: Ask, plan: Plan) -> Decision:
        answer, reasons = await self._decide(HAND_OFF, ask, lambda: self._asking.second(fleet, ask))
        if answer is None:
            raise NoWorker(f"no worker is alive for: {Role.DECODE}; start one, or wait until it is ready")
        chosen = plan.model_copy(update={"decode": _assignment(answer), "decode_rank": answer["rank"]})
        return Decision(chosen, reasons, answer["step"])

    async def _first(self, fleet: Fleet, ask: Ask, *, dry: bool) -> Decision:
        answer, reasons = await self._decide(
            PLACE, ask, lambda: self._asking.first(fleet, ask, next(self._turns), dry=dry)
        )
        assert answer is not None
        prefill, rank, whole = _assignment(answer), answer["rank"], answer["stage"] == "whole"
        plan = Plan(
            prefill=prefill,
            decode=prefill if whole else None,
            prefill_rank=rank,
            decode_rank=rank if whole else 0,
            encode={identity: _assignment(one) for identity, one in answer["encode"].items()},
        )
        return Decision(plan, reasons, answer["step"])

    async def _decide(self, scripts: Scripts, ask: Ask, asked: Callable[[], Json]) -> tuple[Json | None, Explanation]:
        policy = self._settings.policy
        why = ""
        with needed("routing needs", policy):
            if policy != "least_loaded":
                try:
                    async with asyncio.timeout(self._settings.timeout_s):
                        return await self._run(scripts, policy, ask, asked())
                except TimeoutError:
                    log.warning("routing is slow, request %s goes to the least loaded worker", ask.request_id)
                    why = "slow"
                except (ResponseError, ValueError) as error:
                    log.error("routing failed, request %s goes to the least loaded worker: %s", ask.request_id, error)
                    why = "failed"
            return await self._run(scripts, "least_loaded", ask, asked(), why)

    async def _run(
        self, scripts: Scripts, policy: Policy, ask: Ask, asked: Json, fallback: str = ""
    ) -> tuple[Json | None, Explanation]:
        names = [keys.placed(ask.owner), keys.OWNERS]
        chain = "".join(ask.view.blocks) if policy in BY_COST else ""
        text = await scripts[policy].run(self._tick, names, orjson.dumps(asked), chain)
        answer: Json | None = None if text is None else orjson.loads(text)
        return answer, _explanation(answer, policy, fallback, ask)


def _explanation(answer: Json | None, policy: Policy, fallback: str, ask: Ask) -> Explanation:
    found: Json = answer or {"candidates": [], "encode": {}}
    return Explanation(
        policy=policy,
        fallback=fallback,
        blocks=len(ask.view.blocks),
        tokens=ask.view.tokens,
        exact=ask.view.exact,
        candidates=found["candidates"],
        encode={identity: one["worker"] for identity, one in found["encode"].items()},
    )


def _assignment(found: Json) -> Assignment:
    return Assignment(worker=found["worker"], incarnation=found["incarnation"])


def _refuse_missing(fleet: Fleet, ask: Ask) -> None:
    missing = fleet.missing(ask.media)
    if not missing:
        return
    what = " that takes media (--enable-multimodal)" if ask.media and not fleet.missing(media=False) else ""
    raise NoWorker(f"no worker{what} for: {', '.join(missing)}; start one, or wait until it is ready")
