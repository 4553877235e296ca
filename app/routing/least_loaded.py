"""The least loaded worker of each role, counted in requests placed and not ended."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from app import keys
from app.errors import BrokerUnavailable, NoWorker
from app.messages import Assignment, Plan
from app.registry import Fleet, WorkerRecord
from app.routing.base import Ask

SCRIPT = Path(__file__).with_name("least_loaded.lua").read_text()


class LeastLoaded:
    """Loads live in Redis, so that all API processes count alike. `redis` is an asyncio client."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._script = redis.register_script(SCRIPT)

    async def plan(self, fleet: Fleet, ask: Ask) -> Plan:
        missing = fleet.missing(ask.media)
        if missing:
            raise NoWorker(f"no worker for: {', '.join(missing)}; start one, or wait until it is ready")
        whole, prefill, decode = fleet.aggregated(ask.media), fleet.prefillers(ask.media), fleet.decoders()
        candidates = [*whole, *prefill, *decode]
        arguments = [time.time(), ask.deadline, ask.request_id, len(whole), len(prefill), random.randrange(1 << 16)]
        try:
            first, second = await self._script([keys.load(one.id) for one in candidates], arguments)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"routing needs Redis, which did not answer ({type(error).__name__})") from error
        chosen = _assign(candidates[first - 1])
        return Plan(prefill=chosen, decode=_assign(candidates[second - 1]) if second else chosen)

    async def release(self, plan: Plan, request_id: str) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for one in plan.workers:
            pipe.zrem(keys.load(one.worker), request_id)
        await pipe.execute()


def _assign(worker: WorkerRecord) -> Assignment:
    return Assignment(worker=worker.id, incarnation=worker.incarnation)
