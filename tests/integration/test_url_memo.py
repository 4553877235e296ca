"""app.media.url_memo in a real Redis."""

from typing import Any

import pytest
import redis.asyncio as aioredis

from app import keys
from app.media.url_memo import UrlMemo, UrlMemory
from app.redis import connect
from tests.items import identity
from tests.redis_server import free_port

URL = "https://images.example.com/cat.png?signature=secret"
CAT = UrlMemory(identity=identity(1), size=9, media_type="image/png", etag='W/"é1"', last_modified="yesterday")


async def the_key(redis: aioredis.Redis) -> str:
    (key,) = await redis.keys("*")
    return str(key.decode())


async def test_what_is_kept_comes_back_to_another_process(redis: Any, redis_url: str) -> None:
    await UrlMemo(redis, 60).put(URL, "salt", CAT)
    other = connect(redis_url, 5.0, name="another process")
    assert await UrlMemo(other, 60).get(URL, "salt") == CAT
    await other.aclose()


async def test_urls_and_salts_are_apart(redis: Any) -> None:
    memo = UrlMemo(redis, 60)
    await memo.put(URL, "salt", CAT)
    for url, salt in ((URL, ""), (URL, "other"), (URL + "s", "alt"), (URL.upper(), "salt"), ("\ud800", "salt")):
        assert await memo.get(url, salt) is None
    assert memo.lost == 0


async def test_the_key_has_a_limit_and_tells_no_url(redis: Any) -> None:
    memo = UrlMemo(redis, 60)
    await memo.put(URL, "salt", CAT)
    key = await the_key(redis)
    assert key.startswith(keys.url("")) and "secret" not in key and len(key) < 60
    assert 0 < await redis.ttl(key) <= 60
    assert b"secret" not in await redis.get(key)


async def test_use_keeps_it(redis: Any) -> None:
    await UrlMemo(redis, 60).put(URL, "salt", CAT)
    await UrlMemo(redis, 6000).get(URL, "salt")
    assert await redis.ttl(await the_key(redis)) > 60


async def test_what_somebody_else_wrote_there_is_unknown(redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    memo = UrlMemo(redis, 60)
    await memo.put(URL, "salt", CAT)
    await redis.set(await the_key(redis), "{}")
    assert await memo.get(URL, "salt") is None
    assert memo.lost == 1 and "lost" in caplog.text and "secret" not in caplog.text


async def test_without_redis_every_url_is_unknown() -> None:
    nobody = connect(f"redis://127.0.0.1:{free_port()}/0", 0.5, name="test")
    memo = UrlMemo(nobody, 60)
    await memo.put(URL, "salt", CAT)
    assert await memo.get(URL, "salt") is None
    assert memo.lost == 2
    await nobody.aclose()
