"""A worker without an engine, which answers every request at once: what is slow then is the API.

python -m bench.echo_worker      (settings as for any worker)
"""

from __future__ import annotations

import asyncio
import signal

from app import settings
from app.messages import Assignment
from app.redis import connect
from app.registry import Registry
from app.roles import ALL
from tests.integration.fake_worker import FakeWorker, count
from tests.messages import worker

ME = Assignment(worker="agg@echo", incarnation="e1")
#: Long, for machines that are so busy that it does not get its turn.
LEASE_S = 60.0


async def main() -> None:
    chosen = settings.current()
    redis = connect(chosen.redis.cache, chosen.redis.timeout_s, name=ME.worker)
    one = FakeWorker(redis, ME, tuple(ALL), count)
    one.record = worker(ME, *ALL, model=chosen.served_name)
    one.registry = Registry(redis, LEASE_S)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with one.running():
        stop = asyncio.create_task(stopped.wait())
        await asyncio.wait({stop, one.beating}, return_when=asyncio.FIRST_COMPLETED)  # beating ends without a Redis
    await redis.aclose()


if __name__ == "__main__":
    asyncio.run(main())
