"""workers.held_adapters: what an engine holds stays for those that need it, and goes after the last of them."""

import asyncio
import time
from typing import Any

from app import keys
from app.adapter_registry import AdapterRegistry
from tests.integration.adapter_cluster import MODEL, SQL, Member, Sources, cluster, load, resolve
from tests.messages import AGG, DECODE, PREFILL
from tests.polling import until
from workers.loras import Limits


async def test_other_content_is_for_new_requests(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL, DECODE) as members:
        await load(registry)
        assert await resolve(registry, request="old") == "sql@v1"
        sources.versions[SQL] = "v2"
        await load(registry)
        assert await resolve(registry, request="new") == "sql@v2"
        for _ in range(3):
            await members[0].adapters._reconcile()
        assert [one.engine.loaded for one in members] == [["sql@v1", "sql@v2"]] * 2
        with members[1].adapters.using("sql@v1"):
            await registry.release("sql@v1", "old")
            await until(lambda: members[0].engine.loaded == ["sql@v2"], "its last request has ended")
            await members[1].adapters._reconcile()
            assert members[1].engine.loaded == ["sql@v1", "sql@v2"]  # where it still runs
        await until(lambda: members[1].engine.loaded == ["sql@v2"], "here, too")


async def test_what_is_used_while_another_one_goes_stays(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    sources.versions["file:///b"] = "b1"
    async with cluster(redis, sources, AGG) as (one,):
        await load(registry)
        await load(registry, "b", "file:///b")
        leaving = one.engine.exit = asyncio.Event()
        # In one step of Redis, so that the worker sees them go together.
        await redis.delete(keys.lora(MODEL), keys.lora_loads(MODEL))
        await until(lambda: one.adapters.held == ["sql@v1"], "the first one goes")
        with one.adapters.using("sql@v1"):
            leaving.set()
            await until(lambda: one.engine.loaded == ["sql@v1"], "it has gone")
            await one.adapters._reconcile()
            assert one.adapters.held == one.engine.loaded == ["sql@v1"]
        await until(lambda: not one.engine.loaded and not sources.held, "the second, too")


async def test_a_request_past_its_deadline_uses_nothing(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    async with cluster(redis, sources, AGG) as (one,):
        await load(registry)
        await registry.resolve("sql", "r", time.time() + 1)
        assert await registry.unload("sql")
        await one.adapters._reconcile()
        assert one.engine.loaded == ["sql@v1"]
        await until(lambda: not one.engine.loaded, "the deadline")
        assert not await registry.unload("sql")


async def test_a_full_engine_says_so(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    sources.versions |= {"file:///b": "b1"}
    async with Member(redis, sources, AGG, limits=Limits(8, 1, 1)).running() as one:
        assert (await load(registry)).state == "published"
        ended = await load(registry, "b", "file:///b")
        assert ended.state == "failed" and "--max-cpu-loras" in ended.workers[AGG.worker].reason
        assert not ended.refused and one.engine.loaded == ["sql@v1"] and sources.held == {"sql@v1": 1}
        await registry.unload("sql")
        assert (await load(registry, "b", "file:///b")).state == "published"  # at once: it makes room for itself
        assert one.engine.most == 1
