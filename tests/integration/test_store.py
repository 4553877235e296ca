"""app.media.store: media bytes in a real Redis."""

from typing import Any

import pytest

from app import keys
from app.errors import BrokerUnavailable, MediaExpired
from app.media import RedisMediaStore
from app.redis import connect
from tests.polling import until
from tests.redis_server import free_port


async def test_the_bytes_come_back_as_often_as_asked(redis: Any) -> None:
    store = RedisMediaStore(redis)
    data = bytes(range(256)) * 1000
    await store.put("a" * 32, data, 60.0)
    assert [await store.get("a" * 32) for _ in range(2)] == [data, data]
    assert 59_000 < await redis.pttl(keys.media("a" * 32)) <= 60_000


async def test_the_same_bytes_again_live_longer(redis: Any) -> None:
    store = RedisMediaStore(redis)
    await store.put("a" * 32, b"x", 5.0)
    await store.put("a" * 32, b"x", 60.0)
    assert await redis.pttl(keys.media("a" * 32)) > 59_000


@pytest.mark.parametrize("seconds", [0.001, 0.0, -5.0])
async def test_a_deadline_that_is_near_is_still_a_lifetime(redis: Any, seconds: float) -> None:
    await RedisMediaStore(redis).put("a" * 32, b"x", seconds)
    assert 0 < await redis.pttl(keys.media("a" * 32)) <= 1000


async def test_expired_media_are_an_error_that_may_be_tried_again(redis: Any) -> None:
    store = RedisMediaStore(redis)
    await store.put("a" * 32, b"x", 1.0)
    assert await store.get("a" * 32) == b"x"

    async def gone() -> bool:
        return not await redis.exists(keys.media("a" * 32))

    await until(gone, "the expiry", 5)
    with pytest.raises(MediaExpired, match="expired"):
        await store.get("a" * 32)


async def test_no_redis_is_an_error_that_may_be_tried_again() -> None:
    client = connect(f"redis://127.0.0.1:{free_port()}/0", 0.5, name="test")
    store = RedisMediaStore(client)
    with pytest.raises(BrokerUnavailable, match="stored"):
        await store.put("a" * 32, b"x", 1.0)
    with pytest.raises(BrokerUnavailable, match="read"):
        await store.get("a" * 32)
    await client.aclose()
