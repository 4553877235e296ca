"""app.sender on a real Redis, and its messages in a real `celery worker`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from app.celery import DECODE_TASK, configuration
from app.errors.serving import BrokerUnavailable
from app.redis import connect
from app.sender import TaskSender
from tests.messages import decode_task
from tests.polling import until
from tests.redis_server import redis_server

ROOT = Path(__file__).parents[2]
QUEUE = "decode.agg@gpu0"


@pytest.fixture
def celery_worker(redis_url: str, redis: Any, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """A worker with one thread, so that tasks run in the order in which they were sent. Reads its log."""
    log = tmp_path / "worker.log"
    command = [sys.executable, "-m", "celery", "-A", "tests.integration.sender_app", "worker", "-l", "INFO", "-c", "1"]
    command += ["-n", "agg@gpu0", "-Q", f"{QUEUE},decode", "--without-gossip", "--without-mingle", "-P", "threads"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=os.environ | {"SENDER_TEST_REDIS": redis_url}
        )
    yield log.read_text
    process.send_signal(signal.SIGQUIT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


async def test_a_celery_worker_runs_what_is_sent_in_order_and_drops_what_expired(
    redis: Any, celery_worker: Callable[[], str]
) -> None:
    sender = TaskSender(redis)
    for n in range(3):
        await sender.send(DECODE_TASK, decode_task(f"r{n}"), QUEUE)
    await sender.send(DECODE_TASK, decode_task("late", time.time() - 1), QUEUE)
    await sender.send(DECODE_TASK, decode_task("last"), QUEUE)

    async def ran() -> list[list[str]]:
        return [line.decode().split() for line in await redis.lrange("ran", 0, -1)]

    async def four_ran() -> bool:
        return len(await ran()) >= 4

    await until(four_ran, "four tasks", 30)
    done = await ran()
    assert [request for request, _, _ in done] == ["r0", "r1", "r2", "last"]
    assert {queue for _, _, queue in done} == {QUEUE}
    assert len({task_id for _, task_id, _ in done}) == 4
    assert await redis.llen(QUEUE) == 0
    assert celery_worker().count("Discarding revoked task: decode[") == 1
    # A queue of the role is read too.
    await sender.send(DECODE_TASK, decode_task("any"), "decode")

    async def role_ran() -> bool:
        return (await ran())[-1][::2] == ["any", "decode"]

    await until(role_ran, "the task in the role's queue")


async def test_kombu_reads_it_from_the_queue(redis: Any, redis_url: str) -> None:
    await TaskSender(redis).send(DECODE_TASK, decode_task("r"), QUEUE)
    options = configuration(redis_url)["broker_transport_options"]

    def take() -> tuple[Any, Any]:
        with Connection(redis_url, transport_options=options) as connection, connection.SimpleQueue(QUEUE) as queue:
            message = queue.get(timeout=5)
            return message.headers, message.payload

    headers, (_, kwargs, _) = await asyncio.to_thread(take)
    assert headers["task"] == DECODE_TASK
    assert headers["kwargsrepr"] == "request=r model=m prompt=3 tokens max=4"
    assert kwargs["message"]["prompt"]["token_ids"] == [1, 2, 3]


async def test_many_sends_at_once_share_round_trips_and_all_arrive(redis: Any) -> None:
    sender = TaskSender(redis)
    before = (await redis.info("stats"))["total_reads_processed"]
    async with asyncio.TaskGroup() as group:
        for n in range(500):
            group.create_task(sender.send(DECODE_TASK, decode_task(f"r{n}"), QUEUE))
    reads = (await redis.info("stats"))["total_reads_processed"] - before
    assert await redis.llen(QUEUE) == 500
    assert reads < 100, "each was a round trip of its own"
    oldest = json.loads(await redis.lindex(QUEUE, -1))
    assert oldest["headers"]["kwargsrepr"].startswith("request=r0 ")


async def test_no_redis_is_an_error_within_the_timeout() -> None:
    with redis_server() as server:
        client = connect(server.url, 0.5, name="test")
        sender = TaskSender(client)
        await sender.send(DECODE_TASK, decode_task("r"), QUEUE)
        server.stop()
        began = time.monotonic()
        answers = await asyncio.gather(
            *(sender.send(DECODE_TASK, decode_task("r"), QUEUE) for _ in range(20)), return_exceptions=True
        )
        assert time.monotonic() - began < 2
        assert {type(answer) for answer in answers} == {BrokerUnavailable}
        server.start()
        await sender.send(DECODE_TASK, decode_task("again"), QUEUE)
        assert await client.llen(QUEUE) == 1
        await client.aclose()


async def test_a_hung_redis_is_an_error_within_the_timeout_and_the_loop_runs_on() -> None:
    with redis_server() as server:
        client = connect(server.url, 0.5, name="test")
        sender = TaskSender(client)
        await sender.send(DECODE_TASK, decode_task("r"), QUEUE)
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            sending = asyncio.create_task(sender.send(DECODE_TASK, decode_task("r"), QUEUE))
            turns = 0
            async with asyncio.timeout(3):
                while not sending.done():
                    await asyncio.sleep(0.01)
                    turns += 1
            with pytest.raises(BrokerUnavailable, match="TimeoutError"):
                await sending
            assert turns > 10
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        await client.aclose()


async def test_a_queue_that_is_no_list_fails_its_own_tasks_alone(redis: Any) -> None:
    await redis.set("wrong", "no list")
    sender = TaskSender(redis)
    good, bad = await asyncio.gather(
        sender.send(DECODE_TASK, decode_task("r"), QUEUE),
        sender.send(DECODE_TASK, decode_task("r"), "wrong"),
        return_exceptions=True,
    )
    assert good is None and isinstance(bad, BrokerUnavailable)


async def test_what_may_wait_is_taken_after_what_came_later(redis: Any, redis_url: str) -> None:
    sender = TaskSender(redis)
    for name, step in (("patient", 5), ("urgent", 0)):
        await sender.send(DECODE_TASK, decode_task(name), QUEUE, step)
    options = configuration(redis_url)["broker_transport_options"]

    def take() -> list[str]:
        with Connection(redis_url, transport_options=options) as connection, connection.SimpleQueue(QUEUE) as queue:
            return [queue.get(timeout=5).payload[1]["message"]["request_id"] for _ in range(2)]

    assert await asyncio.to_thread(take) == ["urgent", "patient"]
