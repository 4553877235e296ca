"""The worker pool in real `celery worker` processes on a real Redis."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from celery import Celery
from kombu import Connection
from kombu.transport.redis import Channel

from app import kombu_client
from tests.integration import pool_app
from tests.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
LIMIT_S = 40.0
T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str, limit_s: float = LIMIT_S) -> T:
    """The condition's first true value."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.01)
    return value


@dataclass
class Worker:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + LIMIT_S
        while words not in self.text:
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"{self.name} (exit code {self.process.poll()}) did not say {words!r}:\n{self.text}")
            time.sleep(0.01)

    def ended(self, limit_s: float = LIMIT_S) -> int:
        return self.process.wait(limit_s)


@dataclass
class Broker:
    """What the tests use to send tasks and to see what becomes of them."""

    url: str
    app: Celery
    store: Any
    events: list[dict[str, Any]] = field(default_factory=list)

    def send(self, name: str, queue: str, *args: Any, **options: Any) -> str:
        task_id: str = self.app.send_task(name, args=args, queue=queue, **options).id
        return task_id

    def started(self, queue: str, name: str = "hold", **options: Any) -> str:
        task_id = self.send(name, queue, **options)
        self.wait_log(task_id, "started")
        return task_id

    def release(self, task_id: str) -> None:
        self.store.rpush(f"release:{task_id}", "go")

    def log(self, task_id: str) -> list[str]:
        entries: list[str] = self.store.lrange(f"log:{task_id}", 0, -1)
        return entries

    def wait_log(self, task_id: str, *entries: str) -> None:
        until(lambda: self.log(task_id)[-len(entries) :] == list(entries), f"{entries} of {task_id}")

    def revoke(self, task_id: str) -> None:
        self.app.control.revoke(task_id, terminate=True)

    def types(self, task_id: str) -> list[str]:
        return [event["type"] for event in list(self.events) if event.get("uuid") == task_id]

    def wait_event(self, task_id: str, kind: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            for event in list(self.events):
                if event.get("uuid") == task_id and event["type"] == kind:
                    return event
            return None

        return until(found, f"{kind} of {task_id}")


@contextmanager
def connected(url: str) -> Iterator[Broker]:
    app = pool_app.create(url)
    with redis.Redis.from_url(url, decode_responses=True) as store:
        yield Broker(url, app, store)
    app.pool.force_close_all()
    app.amqp.producer_pool.force_close_all()


@contextmanager
def listening(broker: Broker) -> Iterator[None]:
    """A real event receiver, as Flower has one."""
    with broker.app.connection() as connection:
        receiver = broker.app.events.Receiver(connection, handlers={"*": broker.events.append})
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
        thread.start()
        yield
        receiver.should_stop = True
        thread.join(10)


@contextmanager
def worker(url: str, name: str, folder: Path, *options: str, **environment: str) -> Iterator[Worker]:
    """A worker process that takes from the queue of its name. Does not wait until it is ready."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "celery", "-A", "tests.integration.pool_app", "worker", "-l", "INFO"]
    command += ["-n", f"{name}@test", "-Q", name, "--without-gossip", "--without-mingle", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "POOL_TEST_REDIS": url, **environment}
        )
    try:
        yield Worker(name, process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def broker(server: RedisServer) -> Iterator[Broker]:
    with connected(server.url) as broker, listening(broker):
        yield broker


@pytest.fixture(scope="module")
def pool(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The worker that most tests share: 8 slots, early acknowledgement, queue ``pool``."""
    with worker(broker.url, "pool", tmp_path_factory.mktemp("pool"), "-c", "8") as running:
        running.wait_for("ready.")
        until(lambda: [e for e in broker.events if e["type"].startswith("worker-")], "the worker's events")
        yield running


def test_tasks_run_at_the_same_time(pool: Worker, broker: Broker) -> None:
    tasks = [broker.send("hold", "pool") for _ in range(9)]
    first, ninth = tasks[:8], tasks[8]
    for task in first:
        broker.wait_log(task, "started")
    assert all(broker.log(task) == ["started"] for task in first), "all eight are in flight"
    assert broker.log(ninth) == [] and broker.store.llen("pool") == 1, "the ninth waits in Redis"
    for task in tasks:
        broker.release(task)
    for task in tasks:
        broker.wait_log(task, "started", "finished")
        broker.wait_event(task, "task-succeeded")
        assert broker.types(task) == ["task-received", "task-started", "task-succeeded"]


def test_ends_are_told_at_once(pool: Worker, broker: Broker) -> None:
    begin = time.monotonic()
    for _ in range(6):
        task = broker.started("pool")
        broker.release(task)
        broker.wait_event(task, "task-succeeded")
    assert time.monotonic() - begin < 4, "the hub's poller sleeps up to a second if it is not woken"


def test_revoked_task_is_cancelled_and_its_neighbour_is_not(pool: Worker, broker: Broker) -> None:
    neighbour, task = broker.started("pool"), broker.started("pool")
    broker.revoke(task)
    broker.wait_log(task, "started", "cancelled")
    broker.wait_event(task, "task-revoked")
    broker.release(neighbour)
    broker.wait_log(neighbour, "started", "finished")
    broker.wait_event(neighbour, "task-succeeded")
    assert broker.types(task) == ["task-received", "task-started", "task-revoked"]


def test_cancelling_the_asyncio_task_ends_the_task_as_revoked(pool: Worker, broker: Broker) -> None:
    task = broker.send("cancel_itself", "pool")
    broker.wait_event(task, "task-revoked")
    assert broker.types(task) == ["task-received", "task-started", "task-revoked"]


def test_soft_limit(pool: Worker, broker: Broker) -> None:
    task = broker.send("hold", "pool", soft_time_limit=0.2)
    broker.wait_log(task, "started", "cancelled")
    assert "SoftTimeLimitExceeded" in broker.wait_event(task, "task-failed")["exception"]
    assert f"Soft time limit (0.2s) exceeded for hold[{task}]" in pool.text


def test_task_may_return_a_result_after_its_soft_limit(pool: Worker, broker: Broker) -> None:
    task = broker.send("clean_up", "pool", soft_time_limit=0.2)
    broker.wait_log(task, "started", "cleaning")
    broker.release(task)
    assert broker.wait_event(task, "task-succeeded")["result"] == "'partial'"


def test_hard_limit(pool: Worker, broker: Broker) -> None:
    task = broker.send("hold", "pool", time_limit=0.2)
    broker.wait_log(task, "started", "cancelled")
    assert "TimeLimitExceeded(0.2" in broker.wait_event(task, "task-failed")["traceback"]
    assert broker.types(task) == ["task-received", "task-started", "task-failed"]


def test_hard_limit_during_the_clean_up_after_the_soft_one(pool: Worker, broker: Broker) -> None:
    task = broker.send("clean_up", "pool", soft_time_limit=0.2, time_limit=0.6)
    assert "TimeLimitExceeded(0.6" in broker.wait_event(task, "task-failed")["traceback"]
    assert broker.log(task) == ["started", "cleaning"]


def test_cancelled_task_keeps_its_slot_until_it_has_cleaned_up(pool: Worker, broker: Broker) -> None:
    cleaning = [broker.started("pool", "clean_up") for _ in range(8)]
    for task in cleaning:
        broker.revoke(task)
        broker.wait_log(task, "started", "cleaning")
    waiting, revoked = broker.send("hold", "pool"), broker.send("hold", "pool")
    for task in (waiting, revoked):
        broker.wait_event(task, "task-received")
    broker.revoke(revoked)
    broker.wait_event(revoked, "task-revoked")
    assert statistics(broker)["running"] == 8 and statistics(broker)["waiting"] == 1
    assert broker.log(waiting) == []
    for task in [*cleaning, waiting]:
        broker.release(task)
    broker.wait_log(waiting, "started", "finished")
    broker.wait_event(waiting, "task-succeeded")
    assert broker.log(revoked) == []


def statistics(broker: Broker) -> dict[str, Any]:
    answer = broker.app.control.inspect(destination=["pool@test"], timeout=10, limit=1).stats()
    pool: dict[str, Any] = answer["pool@test"]["pool"]
    return pool


def test_grow_and_shrink(pool: Worker, broker: Broker) -> None:
    assert statistics(broker)["max-concurrency"] == 8
    broker.app.control.pool_grow(1, destination=["pool@test"], reply=True, timeout=10, limit=1)
    tasks = [broker.started("pool") for _ in range(9)]
    assert statistics(broker)["running"] == 9
    broker.app.control.pool_shrink(1, destination=["pool@test"], reply=True, timeout=10, limit=1)
    extra = broker.send("hold", "pool")
    broker.release(tasks[0])
    broker.wait_event(tasks[0], "task-succeeded")
    assert broker.log(extra) == [] and statistics(broker)["max-concurrency"] == 8
    for task in [*tasks[1:], extra]:
        broker.release(task)
        broker.wait_event(task, "task-succeeded")


def test_statistics_for_flower(pool: Worker, broker: Broker) -> None:
    shown = statistics(broker)
    assert shown["implementation"] == "workers.pool:TaskPool"
    assert shown["processes"] == [pool.process.pid]


def test_failure_shows_the_bodys_frames(pool: Worker, broker: Broker) -> None:
    task = broker.send("fail", "pool")
    event = broker.wait_event(task, "task-failed")
    assert "in fail" in event["traceback"] and "in innermost" in event["traceback"]
    assert "told to fail" in event["traceback"]
    assert f"Task fail[{task}] raised unexpected" in pool.text


@pytest.mark.parametrize(("name", "tries"), [("again", 3), ("again_by_itself", 2)])
def test_retry(pool: Worker, broker: Broker, name: str, tries: int) -> None:
    task = broker.send(name, "pool")
    broker.wait_event(task, "task-succeeded")
    assert broker.log(task) == [f"try {number}" for number in range(tries)]
    assert broker.types(task).count("task-retried") == tries - 1


def test_request_in_the_coroutine(pool: Worker, broker: Broker) -> None:
    tasks = [broker.app.send_task("who", [n], {"k": n}, queue="pool").id for n in range(8)]
    for n, task in enumerate(tasks):
        broker.wait_log(task, f"{task} [{n}] {{'k': {n}}} False")


def test_synchronous_task_does_not_hold_the_loop(pool: Worker, broker: Broker) -> None:
    blocking = broker.send("synchronous", "pool")
    until(lambda: broker.log(blocking), "the synchronous task")
    task = broker.started("pool")
    broker.release(task)
    broker.wait_log(task, "started", "finished")
    assert broker.log(blocking) != ["tasks"] and len(broker.log(blocking)) == 1
    broker.release(blocking)
    broker.wait_event(blocking, "task-succeeded")


def test_sigterm_lets_the_running_task_finish(broker: Broker, tmp_path: Path) -> None:
    with worker(broker.url, "warm", tmp_path, "-c", "1") as running:
        task, queued = broker.started("warm"), broker.send("hold", "warm")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("waiting for 1 task(s) to end")
        broker.release(task)
        assert running.ended() == 0
    assert broker.log(task) == ["started", "finished"]
    assert broker.wait_event(task, "task-succeeded")
    assert broker.log(queued) == [] and broker.store.llen("warm") == 1


def test_sigterm_acks_what_ends_and_gives_back_what_has_not_started(broker: Broker, tmp_path: Path) -> None:
    with worker(broker.url, "late", tmp_path, "-c", "2", POOL_TEST_LATE="1") as running:
        tasks, waiting = [broker.started("late") for _ in range(2)], broker.send("hold", "late")
        broker.wait_event(waiting, "task-received")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("waiting for 2 task(s) to end")
        assert unacknowledged(broker) == sorted([*tasks, waiting])
        broker.release(tasks[0])
        until(lambda: unacknowledged(broker) == sorted([tasks[1], waiting]), "the ack, while the other task runs")
        broker.release(tasks[1])
        assert running.ended() == 0
    assert all(broker.log(task) == ["started", "finished"] for task in tasks)
    assert queued(broker, "late") == [waiting]


def test_sigquit_cancels_and_gives_back(broker: Broker, tmp_path: Path) -> None:
    with worker(broker.url, "cold", tmp_path, "-c", "1", POOL_TEST_LATE="1") as running:
        task, waiting = broker.started("cold"), broker.send("hold", "cold")
        broker.wait_event(waiting, "task-received")
        running.process.send_signal(signal.SIGQUIT)
        running.ended()
    assert broker.log(task) == ["started", "cancelled"] and broker.log(waiting) == []
    assert queued(broker, "cold") == sorted([task, waiting])


def test_sigquit_cuts_a_warm_shutdown_short(broker: Broker, tmp_path: Path) -> None:
    with worker(broker.url, "both", tmp_path, "-c", "2") as running:
        task = broker.started("both")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("waiting for 1 task(s) to end")
        running.process.send_signal(signal.SIGQUIT)
        running.ended()
        assert "Traceback" not in running.text and "given up" not in running.text
    assert broker.log(task) == ["started", "cancelled"]


def test_soft_shutdown_finishes_the_short_and_gives_back_the_long(broker: Broker, tmp_path: Path) -> None:
    late = {"POOL_TEST_LATE": "1", "POOL_TEST_SOFT_SHUTDOWN": "2"}
    with worker(broker.url, "soft", tmp_path, "-c", "2", **late) as running:
        short, long = broker.started("soft"), broker.started("soft")
        running.process.send_signal(signal.SIGQUIT)
        running.wait_for("Initiating Soft Shutdown")
        broker.release(short)
        running.ended()
    assert broker.log(short) == ["started", "finished"] and broker.log(long) == ["started", "cancelled"]
    assert queued(broker, "soft") == [long]


def queued(broker: Broker, queue: str) -> list[str]:
    """The ids of the tasks in a queue, each as often as it is there; the broker holds none back as unacknowledged."""
    assert unacknowledged(broker) == []
    messages = broker.store.lrange(queue, 0, -1) + broker.store.lrange(f"{queue}|5", 0, -1)
    return sorted(json.loads(message)["headers"]["id"] for message in messages)


def unacknowledged(broker: Broker) -> list[str]:
    return sorted(json.loads(kept)[0]["headers"]["id"] for kept in broker.store.hvals("unacked"))


def test_new_task_runs_after_a_broker_restart(tmp_path: Path) -> None:
    with (
        redis_server() as server,
        connected(server.url) as broker,
        worker(server.url, "restart", tmp_path, "-c", "4") as running,
    ):
        broker.started("restart")
        server.restart()
        new = broker.started("restart")
        broker.release(new)
        broker.wait_log(new, "started", "finished")
        last = broker.started("restart")
        running.process.send_signal(signal.SIGQUIT)
        running.ended()
        assert broker.log(last) == ["started", "cancelled"], "a cold shutdown cancels early-acknowledged tasks too"


def test_async_task_on_a_pool_of_celerys_fails_loudly(broker: Broker, tmp_path: Path) -> None:
    with worker(broker.url, "threads", tmp_path, "-c", "2", "-P", "threads") as running:
        task = broker.send("hold", "threads")
        event = broker.wait_event(task, "task-failed")
        assert "RuntimeError" in event["exception"] and "worker_pool='workers.pool:TaskPool'" in event["exception"]
        assert "never awaited" not in running.text
    assert broker.log(task) == [] and "task-succeeded" not in broker.types(task)


@pytest.mark.parametrize(("name", "args", "code"), [("leave", (7,), 7), ("kill_loop", (), 1)])
def test_worker_ends_with_sys_exit_or_the_death_of_its_loop(
    broker: Broker, tmp_path: Path, name: str, args: tuple[int, ...], code: int
) -> None:
    with worker(broker.url, name, tmp_path, "-c", "2") as running:
        running.wait_for("ready.")
        broker.send(name, name, *args)
        assert running.ended() == code, running.text


def test_kombu_builds_one_redis_client_for_many_messages(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []

    def create(channel: Channel, *args: Any, **kwargs: Any) -> Any:
        built.append(channel)
        return original(channel, *args, **kwargs)

    original = Channel._create_client
    kombu_client.install()
    with Connection(broker.url) as connection, connection.SimpleQueue("clients") as messages:
        messages.put({"n": 0})
        monkeypatch.setattr(Channel, "_create_client", create)
        for n in range(1, 20):
            messages.put({"n": n})
        assert built == []
        assert [messages.get(timeout=2).payload["n"] for _ in range(20)] == list(range(20))
        # kombu makes a new pool after a lost connection; a client of the old one must not outlive it.
        messages.channel._disconnect_pools()
        messages.put({"n": 20})
        assert messages.get(timeout=2).payload == {"n": 20}
        assert built
