"""A worker without an engine, which answers every request at once, or by the step: what is slow then is the API.

python -m bench.echo_worker [--step-ms 0]      (settings as for any worker)
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import Any

from app import garbage, settings
from app.messages.plans import Assignment
from app.messages.tasks import DecodeTask
from app.redis import connect
from app.registry import EngineState, Registry
from app.roles import ALL
from bench.steps import Steps
from tests.integration.fake_worker import FakeWorker, Stage, count
from tests.messages import worker

ME = Assignment(worker="agg@echo", incarnation="e1")
#: Room for as many requests as a benchmark has in flight.
ROOM = EngineState(vllm="0", max_model_len=2048, block_size=16, kv_tokens=1 << 21)
#: Long, for machines that are so busy that it does not get its turn.
LEASE_S = 60.0


def forgetting(stage: Stage) -> Stage:
    """A worker that kept all tasks would stop ever longer for the collector of cycles."""

    async def forgets(one: FakeWorker, task: Any) -> None:
        one.taken.clear()
        await stage(one, task)

    return forgets


def by_step(steps: Steps) -> Stage:
    async def stage(one: FakeWorker, task: DecodeTask) -> None:
        number = task.params["max_tokens"]
        async for new in steps.tokens(number):
            for seq in new:
                one.say(task, seq, finish_reason="length" if seq == number - 1 else None)

    return stage


async def main(step_s: float) -> None:
    chosen = settings.current()
    redis = connect(chosen.redis.cache, chosen.redis.timeout_s, name=ME.worker)
    steps = Steps(step_s)
    one = FakeWorker(redis, ME, tuple(ALL), forgetting(by_step(steps) if step_s else count))
    one.record = worker(ME, *ALL, model=chosen.served_name, concurrency=1024, engine=ROOM)
    one.registry = Registry(redis, LEASE_S)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    garbage.leave_out_what_is_there()
    async with one.running():
        # A task that ends has failed: beating does without a Redis.
        rest = [asyncio.create_task(stopped.wait()), one.beating]
        if step_s:
            rest.append(asyncio.create_task(steps.run()))
        await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
    await redis.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=0.0, help="0: at once")
    asyncio.run(main(parser.parse_args().step_ms / 1e3))
