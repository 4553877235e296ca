"""infra/redis.conf, as Docker Compose's Redis reads it, in a real server."""

from app.redis import connect, refuse_unsafe_broker
from tests.redis_server import HOST, redis_server
from tests.unit.test_compose import ROOT


async def test_the_server_takes_the_file_and_is_a_safe_broker() -> None:
    # Bound to loopback again, after what the file says: here it would be open to everybody.
    options = ("--include", str(ROOT / "infra" / "redis.conf"), "--bind", HOST)
    with redis_server(None, *options) as server:
        client = connect(server.url, 5.0, name="test")
        try:
            await refuse_unsafe_broker(client, server.url)
            settings = await client.config_get("maxmemory*", "save", "protected-mode")
        finally:
            await client.aclose()
    assert settings["maxmemory-policy"] == "volatile-lru" and settings["maxmemory"] == str(2 << 30)
    assert (settings["save"], settings["protected-mode"]) == ("", "no")
