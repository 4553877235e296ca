"""workers.kv_events: from what an engine publishes, by vLLM's own publisher, to what routers read in a real Redis."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from app import keys
from app.routing.blocks import chain
from app.settings import Settings
from tests.kv_publisher import Publisher, removed, stored
from tests.polling import until
from workers.kv_events import service
from workers.kv_events.service import KVEvents

pytestmark = pytest.mark.usefixtures("vllm")

BLOCK = 16
IDS = list(range(64))
WORKER = "agg@gpu0"


def settings(folder: Path, **sections: Any) -> Settings:
    worker = {"lease_s": 1.0, "heartbeat_s": 0.1}
    return Settings(model="m", tensors={"directory": str(folder)}, worker=worker, **sections)


class Worker:
    def __init__(self, events: KVEvents, publisher: Publisher, redis: Any) -> None:
        self.events = events
        self.publisher = publisher
        self._redis = redis

    async def holds(self, *prompts: list[int]) -> None:
        """Wait until Redis has the blocks of these prompts and no others."""
        wanted = {name.encode() for prompt in prompts for name in chain(prompt, BLOCK)}

        async def equal() -> bool:
            return bool(await self._redis.smembers(keys.kv(WORKER, 0)) == wanted)

        await until(equal, f"the blocks of {len(prompts)} prompts")

    @property
    def counts(self) -> dict[str, int]:
        return self.events.counts()

    def sample(self, name: str, **labels: str) -> float | None:
        return self.events._registry.get_sample_value(name, labels)


@asynccontextmanager
async def working(redis: Any, folder: Path, routing: Any = None, **config: Any) -> AsyncIterator[Worker]:
    events = KVEvents(settings(folder, routing=routing or {}), WORKER, redis, CollectorRegistry())
    publisher = Publisher(events.sockets, **config)
    tasks = [asyncio.create_task(one) for one in events.start({0: publisher.source}, BLOCK)]
    try:
        yield Worker(events, publisher, redis)
        assert not any(task.done() for task in tasks), "its end would be the worker's"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await events.close()
        await asyncio.to_thread(publisher.close)
        events.folder.remove()


async def test_redis_has_what_the_engine_holds(redis: Any, shared_memory: Path) -> None:
    async with working(redis, shared_memory) as worker:
        worker.publisher.send(stored(IDS[:32], BLOCK))
        await worker.holds(IDS[:32])
        worker.publisher.send(stored(IDS[32:], BLOCK, IDS[:32]), stored(IDS[1:17], BLOCK))
        await worker.holds(IDS, IDS[1:17])
        worker.publisher.send(removed(IDS), removed(IDS[1:17]))
        await worker.holds(IDS[:48])
        worker.publisher.send()
        await worker.holds()
        assert worker.sample("trivet_kv_events_total", event="stored") == 5
        assert worker.sample("trivet_kv_blocks", rank="0") == 0
    assert not await redis.exists(keys.kv(WORKER, 0)) and not worker.events.sockets.exists()


async def test_a_restart_begins_clean(redis: Any, shared_memory: Path) -> None:
    await redis.sadd(keys.kv(WORKER, 0), *chain(IDS, BLOCK))
    async with working(redis, shared_memory) as worker:
        await worker.holds()


async def test_what_got_lost_on_the_way_is_replayed(redis: Any, shared_memory: Path) -> None:
    async with working(redis, shared_memory) as worker:
        worker.publisher.send(stored(IDS[:16], BLOCK))
        await worker.holds(IDS[:16])
        worker.publisher.lose(stored(IDS[16:32], BLOCK, IDS[:16]))
        worker.publisher.send(stored(IDS[32:], BLOCK, IDS[:32]))
        await worker.holds(IDS)
        assert (worker.counts["gaps"] >= 1, worker.counts["lost"], worker.counts["rebuilds"]) == (True, 0, 0)
        assert not worker.events.reporting()


async def test_what_is_lost_for_good_is_learnt_anew(redis: Any, shared_memory: Path) -> None:
    async with working(redis, shared_memory, buffer_steps=2) as worker:
        worker.publisher.send(stored(IDS[:32], BLOCK))
        await worker.holds(IDS[:32])
        worker.publisher.lose(removed(IDS[:32]))
        worker.publisher.lose(stored(IDS[1:17], BLOCK), count=3)
        worker.publisher.send(stored(IDS[2:18], BLOCK))
        await worker.holds(IDS[1:17], IDS[2:18])
        assert worker.counts["rebuilds"] == worker.counts["lost"] == 1
        assert worker.events.reporting(), "requests report what they find"
        worker.publisher.send(stored(IDS[:16], BLOCK))
        await worker.holds(IDS[1:17], IDS[2:18], IDS[:16])


async def test_blocks_that_follow_unknown_ones_make_the_engine_report(redis: Any, shared_memory: Path) -> None:
    async with working(redis, shared_memory) as worker:
        worker.publisher.send(stored(IDS[16:32], BLOCK, IDS[:16]))
        await until(worker.events.reporting, "the engine is to report")
        await worker.holds()
        worker.publisher.send(stored(IDS[:32], BLOCK))
        await worker.holds(IDS[:32])


async def test_an_engine_with_too_many_blocks_tells_which_are_in_use(redis: Any, shared_memory: Path) -> None:
    async with working(redis, shared_memory, routing={"max_blocks_per_worker": 3}) as worker:
        worker.publisher.send(stored(IDS[:32], BLOCK))
        await worker.holds(IDS[:32])
        assert not worker.events.reporting()
        worker.publisher.send(stored(IDS[2:18], BLOCK))
        await worker.holds(IDS[:32], IDS[2:18])
        await until(worker.events.reporting, "the engine is to report")
        worker.publisher.send(stored(IDS[:32], BLOCK), stored(IDS[3:19], BLOCK))
        await worker.holds(IDS[:32], IDS[3:19])
        worker.publisher.send(removed(IDS[:32]))
        await worker.holds(IDS[:16], IDS[3:19])


async def test_a_fault_ends_nothing(redis: Any, shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PAUSE_S", 0.01)
    async with working(redis, shared_memory) as worker:
        ledger = worker.events.ranks[0].ledger
        worker.publisher.send(stored(IDS[:16], BLOCK))
        await worker.holds(IDS[:16])
        with monkeypatch.context() as patched:
            patched.setattr(ledger, "take", _fail)
            worker.publisher.send()
            await until(lambda: worker.counts["rebuilds"] == 1, "it begins anew")
        worker.publisher.send(stored(IDS[1:17], BLOCK))
        await worker.holds(IDS[1:17])


def _fail(_batch: Any) -> None:
    raise ValueError("a fault")


async def test_the_blocks_of_a_killed_worker_are_gone_after_its_lease(redis: Any, redis_url: str) -> None:
    code = (
        "import asyncio\n"
        "from app.redis import connect\n"
        "from app.routing.affinity import HeldBlocks\n"
        "async def main():\n"
        f"    held = HeldBlocks(connect({redis_url!r}, 5.0, name='w'), {keys.kv(WORKER, 0)!r},\n"
        "        lease_s=1.0, renew_s=0.1, most=10)\n"
        "    held.add(['a', 'b'])\n"
        "    await held.run()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        await until(lambda: redis.exists(keys.kv(WORKER, 0)), "the blocks are there")
    finally:
        process.kill()
        await process.wait()

    async def gone() -> bool:
        return not await redis.exists(keys.kv(WORKER, 0))

    await until(gone, "the blocks go")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, True),
        ({"worker": {"roles": "encode"}}, False),
        ({"worker": {"roles": "decode"}}, True),
        ({"routing": {"kv_events": False}}, False),
    ],
)
def test_who_publishes(given: dict[str, Any], wanted: bool) -> None:
    assert service.wanted(Settings(model="m", **given)) == wanted
