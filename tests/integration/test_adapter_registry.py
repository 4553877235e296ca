"""Adapters of a cluster: loaded by all workers or by none, whatever fails on the way."""

import asyncio
from typing import Any

import pytest

from app import keys
from app.adapter_registry import AdapterRegistry, Report, lora_number
from app.errors.adapters import AdapterConflict, AdapterLoading, AdapterMissing
from app.errors.requests import ModelNotFound
from app.errors.serving import NoWorker, WorkerLost
from app.messages.plans import Assignment
from app.roles import Role
from tests.integration.adapter_cluster import MODEL, SQL, Member, Sources, cluster, load, resolve
from tests.messages import AGG, DECODE, ENCODE, PREFILL
from tests.polling import until
from workers import adapters as loading

AGAIN = Assignment(worker=DECODE.worker, incarnation="d-again")


async def test_a_name_is_known_once_all_workers_have_it(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    async with cluster(redis, sources, PREFILL, DECODE) as members:
        gate = members[1].engine.gate = asyncio.Event()
        begun = await registry.begin("sql", SQL, 20.0)
        await until(lambda: members[0].engine.loaded, "the first worker")
        with pytest.raises(AdapterLoading):
            await resolve(registry)
        assert (await registry.last("sql") or begun).waiting == {DECODE.worker: True}
        gate.set()
        ended = await registry.ended(begun, 20.0)
        assert (ended.state, ended.version, ended.unchanged) == ("published", "v1", False)
        # From any process, in the very next step, and on workers whose records say that they hold it.
        assert await resolve(AdapterRegistry(redis, MODEL)) == "sql@v1"
        for one in await members[0].registry.workers():
            assert one.adapters == ["sql@v1"]
    assert [one.id for one in await registry.published()] == ["sql@v1"]


async def test_the_same_again_changes_nothing(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, AGG) as (one,):
        await load(registry)
        again = await load(registry)
        assert (again.state, again.unchanged) == ("published", True)
        assert one.engine.loaded == ["sql@v1"]
        assert sources.held == {"sql@v1": 1}


async def test_one_that_fails_takes_it_from_all(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL, DECODE) as (prefill, decode):
        decode.engine.fault = RuntimeError("no memory")
        ended = await load(registry)
        assert ended.state == "failed" and not ended.refused
        assert {worker: one.state for worker, one in ended.workers.items()} == {
            PREFILL.worker: "loaded",
            DECODE.worker: "failed",
        }
        assert "RuntimeError" in ended.workers[DECODE.worker].reason
        with pytest.raises(ModelNotFound):
            await resolve(registry)
        await until(lambda: not prefill.engine.loaded, "the other lets it go")
        assert not sources.held and await registry.published() == []
        decode.engine.fault = None
        assert (await load(registry)).state == "published"


async def test_what_is_wrong_with_the_adapter_is_told_apart(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    async with cluster(redis, sources, PREFILL, DECODE):
        ended = await load(registry, uri="file:///nothing")
        assert ended.refused and {one.reason for one in ended.workers.values()} == {"nothing at file:///nothing"}


async def test_an_engine_without_loras_says_so(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with Member(redis, sources, AGG, limits=None).running():
        ended = await load(registry)
        assert ended.state == "failed" and ended.refused and "--enable-lora" in ended.workers[AGG.worker].reason
        assert not sources.fetched


async def test_a_failed_version_leaves_the_one_before(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL, DECODE) as (prefill, decode):
        await load(registry)
        sources.versions[SQL] = "v2"
        decode.engine.fault = RuntimeError("no")
        assert (await load(registry)).state == "failed"
        assert await resolve(registry) == "sql@v1"
        await until(lambda: prefill.engine.loaded == ["sql@v1"], "the new version goes")
        assert decode.engine.loaded == ["sql@v1"]


async def test_content_that_changes_meanwhile_is_no_adapter(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    elsewhere = Sources()
    elsewhere.versions = {SQL: "v2"}
    async with (
        Member(redis, sources, PREFILL).running() as prefill,
        Member(redis, elsewhere, DECODE).running() as decode,
    ):
        ended = await load(registry)
        assert ended.state == "failed" and "content changed" in ended.reason
        await until(lambda: not prefill.engine.loaded and not decode.engine.loaded, "both go")


async def test_a_killed_worker_is_waited_for_no_longer(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL) as (prefill,):
        decode = Member(redis, sources, DECODE)
        decode.engine.gate = asyncio.Event()
        await decode.start()
        begun = await registry.begin("sql", SQL, 20.0)
        await until(lambda: prefill.engine.loaded, "the other has it")
        await decode.lose()
        ended = await registry.ended(begun, 20.0)
        assert ended.state == "published" and list(ended.workers) == [PREFILL.worker]
        async with Member(redis, sources, AGAIN).running() as back:
            assert back.engine.loaded == ["sql@v1"]


async def test_a_load_whose_workers_are_all_gone_ends(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    """Long before its time is over, so that its name is free again."""
    one = Member(redis, sources, AGG)
    one.engine.gate = asyncio.Event()
    await one.start()
    begun = await registry.begin("sql", SQL, 600.0)
    await until(lambda: sources.fetched, "its part is under way")
    await one.lose()
    with pytest.raises(AdapterConflict):
        await registry.begin("sql", "file:///other", 600.0)
    ended = await registry.ended(begun, 600.0)
    assert (ended.state, ended.reason) == ("failed", "all workers that could load it are gone")
    with pytest.raises(ModelNotFound):
        await resolve(registry)
    async with Member(redis, sources, Assignment(worker=AGG.worker, incarnation="a-again")).running() as back:
        assert back.adapters.held == []
        sources.versions["file:///other"] = "o1"
        assert (await load(registry, uri="file:///other")).version == "o1"


async def test_a_worker_that_comes_back_takes_over_its_part(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    one = Member(redis, sources, AGG)
    one.engine.gate = asyncio.Event()
    await one.start()
    begun = await registry.begin("sql", SQL, 20.0)
    await until(lambda: sources.fetched, "its part is under way")
    await one.lose()
    assert (await registry.last("sql") or begun).deserted > 0
    async with Member(redis, sources, Assignment(worker=AGG.worker, incarnation="a-again")).running() as back:
        ended = await registry.ended(begun, 20.0)
        assert (ended.state, ended.workers[AGG.worker].incarnation) == ("published", "a-again")
        assert ended.deserted == 0 and back.engine.loaded == ["sql@v1"]


async def test_a_worker_that_drains_takes_no_part(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL, DECODE) as (_prefill, decode):
        await decode.drain()
        decode.engine.fault = RuntimeError("it is about to end")
        ended = await load(registry)
        assert ended.state == "published" and list(ended.workers) == [PREFILL.worker]
        assert len(sources.fetched) == 1


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_a_draining_worker_said_is_forgotten(
    redis: Any, registry: AdapterRegistry, sources: Sources, leaves: bool
) -> None:
    async with cluster(redis, sources, PREFILL, DECODE) as (prefill, decode):
        prefill.engine.gate, decode.engine.gate = asyncio.Event(), asyncio.Event()
        begun = await registry.begin("sql", SQL, 20.0)
        failed = Report(incarnation=DECODE.incarnation, state="failed", reason="it is about to end")
        await registry.report(begun, DECODE.worker, failed)
        await decode.drain()
        assert await registry.report(begun, DECODE.worker, failed)
        if leaves:
            await decode.lose()
        prefill.engine.gate.set()
        ended = await registry.ended(begun, 20.0)
        assert ended.state == "published" and list(ended.workers) == [PREFILL.worker]
        decode.engine.gate.set()


async def test_an_engine_that_dies_says_nothing_of_the_adapter(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    async with cluster(redis, sources, PREFILL) as (prefill,):
        decode = Member(redis, sources, DECODE)
        decode.engine.fault = WorkerLost("the worker's engine died")
        await decode.start()
        begun = await registry.begin("sql", SQL, 20.0)
        await until(lambda: prefill.engine.loaded, "the other has it")
        await until(lambda: len(sources.fetched) > 2, "its part is tried again")
        assert (await registry.last("sql") or begun).waiting == {DECODE.worker: True}
        await decode.lose()
        assert (await registry.ended(begun, 20.0)).state == "published"


async def test_nobody_has_to_wait_for_a_load_to_end(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL, DECODE) as (prefill, decode):
        decode.engine.gate = asyncio.Event()
        await registry.begin("sql", SQL, 1.0)  # and its API process dies

        async def failed() -> bool:
            text = await redis.hget(keys.lora_loads(MODEL), "sql")
            return b'"failed"' in text

        await until(failed, "the workers end it")
        await until(lambda: not prefill.engine.loaded, "it goes")
        decode.engine.gate.set()
        await until(lambda: not decode.engine.loaded and not sources.held, "here, too, though it was under way")


async def test_who_joins_has_them_before_it_registers(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL):
        await load(registry)
        late = Member(redis, sources, DECODE)
        gate = late.engine.gate = asyncio.Event()
        joining = asyncio.create_task(late.start())
        await until(lambda: len(sources.fetched) == 2, "it fetches")
        assert [one.id for one in await late.registry.workers()] == [PREFILL.worker]
        sources.versions["file:///other"] = "o1"
        assert (await load(registry, "other", "file:///other")).state == "published"  # meanwhile, without it
        gate.set()
        await joining
        try:
            found = {one.id: one.adapters for one in await late.registry.workers()}
            assert found[DECODE.worker] == ["other@o1", "sql@v1"]
        finally:
            await late.kill()


async def test_who_joins_fetches_them_all_at_once(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    sources.versions |= {"file:///b": "b1", "file:///c": "c1"}
    async with cluster(redis, sources, PREFILL):
        await load(registry)
        await load(registry, "b", "file:///b")
        await load(registry, "c", "file:///c")
        sources.gate, sources.waiting = asyncio.Event(), 0
        late = Member(redis, sources, DECODE)
        joining = asyncio.create_task(late.start())
        try:
            await until(lambda: sources.waiting == 3, "all are being fetched")
            assert not late.registered.is_set()
            sources.gate.set()
            await joining
            assert sorted(late.engine.loaded) == late.adapters.held == ["b@b1", "c@c1", "sql@v1"]
        finally:
            await late.kill()


async def test_more_than_are_fetched_at_once_have_the_time_limit_each(
    redis: Any, registry: AdapterRegistry, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "THREADS", 1)
    sources.versions["file:///b"] = "b1"
    async with cluster(redis, sources, PREFILL):
        await load(registry)
        await load(registry, "b", "file:///b")
        sources.gate, sources.waiting = asyncio.Event(), 0
        late = Member(redis, sources, DECODE)
        joining = asyncio.create_task(late.start())
        try:
            await until(lambda: sources.waiting == 1, "one is being fetched")
            for _ in range(10):
                await asyncio.sleep(0)
            assert sources.waiting == 1, "the other's time has not begun"
            sources.gate.set()
            await joining
            assert late.adapters.held == ["b@b1", "sql@v1"]
        finally:
            await late.kill()


async def test_one_that_comes_too_late_is_not_missing(
    redis: Any, registry: AdapterRegistry, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(redis, sources, PREFILL):
        await load(registry)
        monkeypatch.setattr(loading, "ENGINE_S", 0.05)
        late = Member(redis, sources, DECODE, settings={"adapters": {"fetch_timeout_s": 0.05}})
        gate = late.engine.gate = asyncio.Event()
        async with late.running():
            assert (late.adapters.held, late.adapters.failed) == ([], {"sql@v1": "not in time"})
            gate.set()
            await until(lambda: late.adapters.held == ["sql@v1"], "the engine has it")
            assert late.adapters.failed == {}


async def test_who_cannot_have_one_joins_without_it(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL):
        await load(registry)
        sources.versions[SQL] = "v2"
        async with Member(redis, sources, DECODE).running() as late:
            assert late.adapters.held == [] and "nothing at" in late.adapters.failed["sql@v1"]
            with pytest.raises(AdapterMissing), late.adapters.using("sql@v1"):
                pytest.fail("it runs")


async def test_a_name_is_loaded_from_one_place_at_a_time(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    async with cluster(redis, sources, AGG) as (one,):
        gate = one.engine.gate = asyncio.Event()
        first = await registry.begin("sql", SQL, 20.0)
        assert (await registry.begin("sql", SQL, 20.0)).load == first.load
        with pytest.raises(AdapterConflict):
            await registry.begin("sql", "file:///other", 20.0)
        await registry.unload("sql")
        assert (await registry.ended(first, 20.0)).state == "failed"
        gate.set()
        await until(lambda: not one.engine.loaded and not sources.held, "nothing is left of it")


async def test_without_workers_nothing_is_loaded(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    with pytest.raises(NoWorker):
        await registry.begin("sql", SQL, 20.0)
    encode = Member(redis, sources, ENCODE, Role.ENCODE)
    await encode.announce()
    with pytest.raises(NoWorker):  # it runs no language model
        await registry.begin("sql", SQL, 20.0)


async def test_a_hundred_loads_leave_nothing(redis: Any, registry: AdapterRegistry, sources: Sources) -> None:
    async with cluster(redis, sources, PREFILL, DECODE) as members:
        for number in range(100):
            sources.versions[SQL] = f"v{number}"
            assert (await load(registry)).version == f"v{number}"
            await resolve(registry, request=str(number))
            await registry.release(f"sql@v{number}", str(number))
            assert await registry.unload("sql")
        await until(lambda: not any(one.engine.loaded for one in members), "all gone")
        assert max(one.engine.most for one in members) <= 4
        assert not sources.held and all(not one.adapters._held.loads for one in members)
        await until(lambda: not any(one.adapters._tasks for one in members), "no task")
    assert await redis.keys("*lora*") == []


async def test_a_redis_that_comes_back_empty_has_no_adapters(
    redis: Any, registry: AdapterRegistry, sources: Sources
) -> None:
    async with cluster(redis, sources, AGG) as (one,):
        await load(registry)
        await redis.flushall()
        with pytest.raises(ModelNotFound):
            await resolve(registry)
        await until(lambda: not one.engine.loaded, "it goes")
        await until(lambda: one.registered.is_set(), "it goes on")
        assert (await load(registry)).state == "published"


def test_numbers_fit_vllms_integers() -> None:
    numbers = {lora_number(f"sql@{one}") for one in range(1000)}
    assert len(numbers) == 1000 and min(numbers) > 0 and max(numbers) < 1 << 31
