"""The least loaded worker of each role, counted in requests placed and not ended."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from app import keys
from app.errors import BrokerUnavailable, NoWorker
from app.messages import Assignment, Plan
from app.registry import Fleet, WorkerRecord
from app.routing.base import Ask
from app.tick import Tick

SCRIPT = Path(__file__).with_name("least_loaded.lua").read_text()


class LeastLoaded:
    """Loads live in Redis, so that all API processes count alike. `redis` is an asyncio client."""

    def __init__(self, redis: Any) -> None:
        self._tick = Tick(redis)
        self._sha = hashlib.sha1(SCRIPT.encode()).hexdigest()  # Redis's own name for the script

    async def plan(self, fleet: Fleet, ask: Ask) -> Plan:
        missing = fleet.missing(ask.media)
        if missing:
            raise NoWorker(f"no worker for: {', '.join(missing)}; start one, or wait until it is ready")
        whole, prefill, decode = fleet.aggregated(ask.media), fleet.prefillers(ask.media), fleet.decoders()
        candidates = [*whole, *prefill, *decode]
        arguments = [time.time(), ask.deadline, ask.request_id, len(whole), len(prefill), random.randrange(1 << 16)]
        try:
            first, second = await self._reserve([keys.load(one.id) for one in candidates], arguments)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"routing needs Redis, which did not answer ({type(error).__name__})") from error
        chosen = _assign(candidates[first - 1])
        return Plan(prefill=chosen, decode=_assign(candidates[second - 1]) if second else chosen)

    async def release(self, plan: Plan, request_id: str) -> None:
        await asyncio.gather(*(self._tick.run("ZREM", keys.load(one.worker), request_id) for one in plan.workers))

    async def _reserve(self, loads: list[str], arguments: list[Any]) -> list[int]:
        """Run the script by its name, and send it whole to a Redis that does not know it yet."""
        try:
            return list(await self._tick.run("EVALSHA", self._sha, len(loads), *loads, *arguments))
        except NoScriptError:
            return list(await self._tick.run("EVAL", SCRIPT, len(loads), *loads, *arguments))


def _assign(worker: WorkerRecord) -> Assignment:
    return Assignment(worker=worker.id, incarnation=worker.incarnation)
