"""The least loaded worker of each role, counted in requests placed and not ended."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from app import keys
from app.errors import BrokerUnavailable, NoWorker
from app.messages import Plan
from app.registry import Fleet
from app.routing.base import Ask, encode_place
from app.scripts import Script
from app.tick import Tick

SCRIPT = Script(Path(__file__).with_name("least_loaded.lua"))


class LeastLoaded:
    """Loads live in Redis, so that all API processes count alike. `redis` is an asyncio client.

    `claim_s` is how long an encode worker that was chosen has for an item before others may take it on.
    """

    def __init__(self, redis: Any, claim_s: float) -> None:
        self._tick = Tick(redis)
        self._claim_ms = int(claim_s * 1000)

    async def plan(self, fleet: Fleet, ask: Ask) -> Plan:
        missing = fleet.missing(ask.media)
        if missing:
            what = " that takes media (--enable-multimodal)" if ask.media and not fleet.missing(media=False) else ""
            raise NoWorker(f"no worker{what} for: {', '.join(missing)}; start one, or wait until it is ready")
        groups = [fleet.aggregated(ask.media), fleet.prefillers(ask.media), fleet.decoders()]
        groups.append(fleet.encoders(ask.fingerprint) if ask.media else [])
        candidates = [worker for group in groups for worker in group]
        names = [keys.load(one.id) for one in candidates]
        for identity in ask.items:
            names += [keys.embedding(ask.fingerprint, identity), keys.encoding(ask.fingerprint, identity)]
        numbers = [time.time(), ask.deadline, ask.request_id, random.randrange(1 << 16), self._claim_ms]
        assignments = [one.assignment.model_dump_json() for one in groups[-1]]
        arguments: list[Any] = [*numbers, *map(len, groups), *assignments, *ask.items]
        try:
            first, second, *encoders = await SCRIPT.run(self._tick, names, *arguments)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"routing needs Redis, which did not answer ({type(error).__name__})") from error
        chosen = candidates[first - 1].assignment
        return Plan(
            prefill=chosen,
            decode=candidates[second - 1].assignment if second else chosen,
            encode={
                item: candidates[at - 1].assignment for item, at in zip(ask.items, encoders, strict=False) if at > 0
            },
        )

    async def release(self, plan: Plan, request_id: str) -> None:
        places = [(one.worker, request_id) for one in plan.workers]
        places += [(one.worker, encode_place(request_id, item)) for item, one in plan.encode.items()]
        await asyncio.gather(*(self._tick.run("ZREM", keys.load(worker), place) for worker, place in places))
