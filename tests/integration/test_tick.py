"""app.tick, over a real server that restarts, hangs and refuses: as the client's own commands do."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.exceptions import RedisError, ResponseError, TimeoutError

from app.redis import connect
from app.tick import Tick
from tests.polling import until
from tests.redis_server import RedisServer, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Any]:
    made = connect(server.url, 0.6, name="test")
    yield made
    await made.aclose()


COMMANDS = [("HSET", "h", "a", "1", "b", "2"), ("HGETALL", "h"), ("HKEYS", "h"), ("HMGET", "h", "a", "c"), ("GET", "x")]


async def test_answers_are_those_of_the_client(client: Any) -> None:
    tick = Tick(client)
    found = await asyncio.gather(*(tick.run(*command) for command in COMMANDS))
    await client.delete("h")
    assert found == [await client.execute_command(*command) for command in COMMANDS]


async def test_one_that_the_server_refuses_does_not_fail_the_others(client: Any) -> None:
    tick = Tick(client)
    await tick.run("SET", "text", "1")
    answers = await asyncio.gather(
        tick.run("GET", "text"), tick.run("LPUSH", "text", "2"), tick.run("GET", "text"), return_exceptions=True
    )
    assert isinstance(answers[1], ResponseError)
    assert [answers[0], answers[2], await tick.run("GET", "text")] == [b"1"] * 3


async def test_an_answer_that_cannot_be_read_is_not_taken_for_anothers(client: Any) -> None:
    tick = Tick(client)
    client.set_response_callback("GET", int)
    await tick.run("SET", "text", "none")
    answers = await asyncio.gather(
        tick.run("ECHO", "1"), tick.run("GET", "text"), tick.run("ECHO", "2"), return_exceptions=True
    )
    assert isinstance(answers[1], ValueError)
    assert [answers[0], answers[2], await tick.run("ECHO", "3")] == [b"1", b"2", b"3"]


async def test_a_restarted_server_costs_no_command(client: Any, server: RedisServer) -> None:
    tick = Tick(client)
    assert await tick.run("PING")
    server.restart()
    assert await tick.run("INCR", "n") == 1


async def test_it_keeps_one_connection(client: Any) -> None:
    tick = Tick(client)
    for _ in range(5):
        await asyncio.gather(*(tick.run("PING") for _ in range(5)))
    assert len(await client.client_list()) == 2, "its own, and the one that asks"


async def test_a_command_that_timed_out_runs_once_at_most_and_the_next_ones_run(
    client: Any, server: RedisServer
) -> None:
    tick = Tick(client)
    await tick.run("PING")
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tick.run("LPUSH", "queue", "task"), 10)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    await until(client.ping, "an answer")
    assert await tick.run("LLEN", "queue") <= 1


async def test_without_a_server_each_command_fails_and_with_it_they_go_on(client: Any, server: RedisServer) -> None:
    tick = Tick(client)
    await tick.run("PING")
    server.stop()
    answers = await asyncio.wait_for(asyncio.gather(*(tick.run("PING") for _ in range(3)), return_exceptions=True), 10)
    assert all(isinstance(one, RedisError | OSError) for one in answers)
    server.start()
    assert await tick.run("PING")
