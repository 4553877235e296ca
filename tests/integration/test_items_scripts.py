"""app.items.scripts: how they get to a real Redis, and what is said when they do not."""

import asyncio
import logging
from typing import Any

import pytest

from app.errors.serving import BrokerUnavailable
from app.items.index import ItemIndex, Outcome
from app.messages.plans import Assignment
from app.redis import connect
from app.settings_sections import ItemSettings
from tests.items import E0, MODEL, descriptor, heard, identity, publish
from tests.redis_server import redis_server

ONE, TWO, THREE = (identity(n) for n in range(3))
E1 = Assignment(worker="encode@gpu1", incarnation="x")


@pytest.fixture
def index(redis: Any) -> ItemIndex:
    return ItemIndex(redis, MODEL, ItemSettings())


async def test_calls_of_one_tick_share_a_round_trip(index: ItemIndex, redis: Any) -> None:
    # Both scripts are known to Redis: one that is not costs a round trip more.
    await index.find([ONE])
    await index.claim(THREE, E0, 60)

    async def commands() -> int:
        return int((await redis.info("commandstats"))["cmdstat_evalsha"]["calls"])

    sent: list[int] = []
    pipeline = redis.pipeline

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append(1)
        return pipeline(*args, **kwargs)

    before = await commands()
    redis.pipeline = counted
    await asyncio.gather(index.find([ONE, TWO, THREE]), index.owns(ONE, E0), index.claim(ONE, E0, 60))
    assert len(sent) <= 2, "a claim runs in a task, so it may come a tick later"
    assert await commands() - before == 2, "one for all items that are looked up, one for the claim"


async def test_a_flushed_script_cache(index: ItemIndex, redis: Any) -> None:
    async def through() -> None:
        await redis.script_flush()
        await index.claim(ONE, E0, 60)
        for step in (
            publish(index, E0, ONE),
            index.add_holder(ONE, E1, descriptor(ONE, E1)),
            index.withdraw(ONE, E1.worker, E1.incarnation),
            index.give_up(ONE, E0),
        ):
            await redis.script_flush()
            await step
        await redis.script_flush()
        assert set((await index.find([ONE]))[ONE].holders) == {E0.worker}

    assert len(await heard(redis, through())) == 2


async def test_redis_away_is_an_error_with_a_name() -> None:
    with redis_server() as server:
        redis = connect(server.url, 1.0, name="test")
        index = ItemIndex(redis, MODEL, ItemSettings())
        await index.claim(ONE, E0, 60)
        server.stop()
        for call in (
            index.find([ONE]),
            index.claim(ONE, E0, 60),
            index.owns(ONE, E0),
            publish(index, E0, ONE),
            index.add_holder(ONE, E0, descriptor(ONE, E0)),
            index.withdraw(ONE, E0.worker),
            index.withdraw_all(E0.worker, [ONE]),
            index.give_up(ONE, E0),
        ):
            with pytest.raises(BrokerUnavailable, match="item index"):
                await call
        server.start()
        assert (await index.claim(ONE, E0, 60)).outcome is Outcome.YOURS
        await redis.aclose()


async def test_a_redis_that_is_full_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(None, "--maxmemory", "1", "--maxmemory-policy", "noeviction") as server:
        redis = connect(server.url, 1.0, name="test")
        with caplog.at_level(logging.ERROR), pytest.raises(BrokerUnavailable):
            await publish(ItemIndex(redis, MODEL, ItemSettings()), E0, ONE)
        assert "publish" in caplog.text and "maxmemory" in caplog.text
        await redis.aclose()
