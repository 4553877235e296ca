"""api.stored.store and api.stored.background: what Redis keeps of responses, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api.stored import Background, ResponseStore
from app import keys
from app.cancellation import is_cancelled
from app.errors.serving import BrokerUnavailable
from app.redis import connect
from app.settings_sections import ApiSettings
from tests.polling import until
from tests.redis_server import free_port

QUEUED: dict[str, Any] = {"id": "resp_1", "status": "queued", "output": []}
DONE: dict[str, Any] = {"id": "resp_1", "status": "completed", "output": [{"type": "message"}]}
CANCELLED = {**QUEUED, "status": "cancelled"}


def store_of(redis: Any) -> ResponseStore:
    settings = ApiSettings(response_store_ttl_s=60, response_store_max_kb=1, request_timeout_s=100.5)
    return ResponseStore(redis, "a", settings)


@pytest.fixture
async def store(redis: Any) -> ResponseStore:
    await redis.set(keys.api("a"), "{}")
    return store_of(redis)


async def test_one_that_is_being_made_lives_as_long_as_its_request_and_one_that_ended_as_the_setting_says(
    store: ResponseStore, redis: Any
) -> None:
    key = keys.response("t", "resp_1")
    assert await store.keep("t", QUEUED, b'["hi"]')
    assert 155 <= await redis.ttl(key) <= 161
    assert await store.settle("t", {**QUEUED, "status": "in_progress"}) == "in_progress"
    assert 155 <= await redis.ttl(key) <= 161
    assert await store.settle("t", DONE) == "completed"
    assert 55 <= await redis.ttl(key) <= 60
    found = await store.find("t", "resp_1")
    assert found is not None and (found.response, found.input) == (DONE, ["hi"])
    assert await store.keep("t", {**DONE, "id": "resp_2"}, b"[]")
    assert 55 <= await redis.ttl(keys.response("t", "resp_2")) <= 60


async def test_the_first_end_is_the_one_that_counts(store: ResponseStore) -> None:
    await store.keep("t", QUEUED, b"[]")
    ends = await asyncio.gather(*(store.settle("t", one) for one in (CANCELLED, DONE)))
    assert ends == ["cancelled", None]
    found = await store.find("t", "resp_1")
    assert found is not None and found.response == CANCELLED


async def test_what_was_deleted_does_not_come_back(store: ResponseStore, redis: Any) -> None:
    await store.keep("t", QUEUED, b"[]")
    assert await store.delete("t", "resp_1")
    assert not await store.delete("t", "resp_1")
    assert await store.settle("t", DONE) is None
    assert await store.find("t", "resp_1") is None
    assert not await redis.exists(keys.response("t", "resp_1"))


async def test_a_tenant_finds_its_own_alone(store: ResponseStore) -> None:
    await store.keep("t", DONE, b"[]")
    assert await store.find("u", "resp_1") is None
    assert not await store.delete("u", "resp_1")
    assert await store.settle("u", CANCELLED) is None


async def test_the_size_is_bounded(store: ResponseStore, redis: Any) -> None:
    assert not await store.keep("t", {**DONE, "text": "x" * 1000}, b"[]")
    assert not await store.keep("t", DONE, b" " * 1000)
    assert await redis.keys("trivet:response:*") == []
    await store.keep("t", QUEUED, b'["%s"]' % (b"x" * 496))
    assert await store.settle("t", {**DONE, "output": ["x" * 600]}, 500) == "failed"
    found = await store.find("t", "resp_1")
    assert found is not None and found.response["output"] == [] and "1 KB" in found.response["error"]["message"]


async def test_one_whose_process_is_gone_has_failed(store: ResponseStore, redis: Any) -> None:
    await store.keep("t", QUEUED, b"[]")
    await redis.delete(keys.api("a"))
    found = await store.find("t", "resp_1")
    assert found is not None and found.status == "failed"
    assert await store.settle("t", DONE) == "completed"  # it was only late with its heartbeat
    found = await store.find("t", "resp_1")
    assert found is not None and found.response == DONE


async def test_without_redis_there_is_an_error() -> None:
    nobody = connect(f"redis://127.0.0.1:{free_port()}/0", 1.0, name="test")
    store = store_of(nobody)
    for asked in (
        store.keep("t", DONE, b"[]"),
        store.settle("t", DONE),
        store.find("t", "resp_1"),
        store.delete("t", "resp_1"),
    ):
        with pytest.raises(BrokerUnavailable, match="stored responses need Redis"):
            await asked
    await nobody.aclose()


@asynccontextmanager
async def listening(redis: Any) -> AsyncIterator[Background]:
    background = Background(redis)
    task = asyncio.create_task(background.listen())
    yield background
    await background.stop()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def work(said: list[str]) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        said.append("ended")


async def test_another_process_is_told_to_stop(redis: Any) -> None:
    said: list[str] = []
    async with listening(redis) as one, listening(redis) as other:
        await one.start("resp_1", work(said))
        await until(lambda: _listeners(redis, 2), "both listen")
        await other.cancel("resp_1")
        await until(lambda: said == ["ended"], "the end")
        assert await is_cancelled(redis, "resp_1")


async def _listeners(redis: Any, number: int) -> bool:
    ((_, found),) = await redis.pubsub_numsub(keys.CANCEL_CHANNEL)
    return int(found) == number


async def test_even_one_that_is_stopped_at_once_comes_to_its_end(redis: Any) -> None:
    said: list[str] = []
    background = Background(redis)
    await background.start("resp_1", work(said))
    await background.stop()
    assert said == ["ended"]


async def test_what_ends_badly_is_logged(redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("a bug")

    background = Background(redis)
    await background.start("resp_1", fail())
    await until(lambda: "resp_1" in caplog.text, "the log")
