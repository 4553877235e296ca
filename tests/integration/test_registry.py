"""app.registry: the entries in a real Redis."""

import logging
from typing import Any

import pytest

from app import keys
from app.registry import Registry, WorkerRecord
from app.roles import ALL, Role
from tests.messages import AGG, DECODE, worker
from tests.polling import until


async def ids(registry: Registry) -> list[str]:
    return [one.id for one in await registry.workers()]


async def test_an_announced_worker_is_found_as_it_is(redis: Any) -> None:
    registry = Registry(redis, 5.0)
    assert await registry.workers() == []
    record = worker(AGG, *ALL, in_flight=3)
    await registry.announce(record)
    assert await registry.workers() == [record]
    changed = record.model_copy(update={"in_flight": 4, "draining": True})
    await registry.announce(changed)
    assert await registry.workers() == [changed]


async def test_the_record_is_text_that_people_can_read(redis: Any) -> None:
    await Registry(redis, 5.0).announce(worker(AGG, *ALL))
    assert WorkerRecord.model_validate_json(await redis.get("trivet:worker:agg@gpu0")).id == "agg@gpu0"
    assert await redis.smembers("trivet:workers") == {b"agg@gpu0"}


async def test_the_lease_is_renewed_and_ends(redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(redis, 0.3)
    await registry.announce(worker(AGG, *ALL))
    assert 0 < await redis.pttl(keys.worker(AGG.worker)) <= 300
    await Registry(redis, 60.0).announce(worker(DECODE, Role.DECODE))

    async def one_left() -> bool:
        return await ids(registry) == [DECODE.worker]

    with caplog.at_level(logging.WARNING, "app.registry"):
        await until(one_left, "the end of the lease")
        assert await redis.smembers(keys.WORKERS) == {DECODE.worker.encode()}, "the dead member stays"
        await ids(registry)
    assert [r.getMessage() for r in caplog.records] == ["workers gone (lease expired): agg@gpu0"]
    await registry.announce(worker(AGG, *ALL))
    assert await ids(registry) == [AGG.worker, DECODE.worker]


async def test_a_removed_worker_leaves_nothing(redis: Any) -> None:
    registry = Registry(redis, 5.0)
    await registry.announce(worker(AGG, *ALL))
    await registry.remove(AGG.worker)
    assert await redis.keys("*") == []


async def test_an_unreadable_record_is_said_once_and_hides_no_other(
    redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(redis, 5.0)
    await registry.announce(worker(AGG, *ALL))
    for name, value in {"old": '{"id": "old", "secret": "hunter2"}', "binary": b"\xff\xfe", "text": "hello"}.items():
        await redis.sadd(keys.WORKERS, name)
        await redis.set(keys.worker(name), value)
    with caplog.at_level(logging.ERROR, "app.registry"):
        assert await ids(registry) == [AGG.worker]
        assert await ids(registry) == [AGG.worker]
    said = [record.getMessage() for record in caplog.records]
    assert sorted(line.split()[4] for line in said) == ["binary", "old", "text"]
    assert all("another version" in line and "hunter2" not in line for line in said)


async def test_a_fleet_too_large_for_a_loop(redis: Any) -> None:
    registry = Registry(redis, 60.0)
    for n in range(100):
        await registry.announce(worker(AGG.model_copy(update={"worker": f"w{n:03}"}), *ALL))
    before = (await redis.info("stats"))["total_commands_processed"]
    assert len(await registry.workers()) == 100
    assert (await redis.info("stats"))["total_commands_processed"] - before < 10
