"""The Celery application of test_pool.py. Its tasks tell Redis what happens to them, in a list ``log:<task id>``.

    POOL_TEST_REDIS=redis://... [POOL_TEST_LATE=1] celery -A tests.integration.pool_app worker

A task that waits does so until something is pushed to ``release:<task id>``.
"""

import asyncio
import functools
import os
import sys
import threading
from typing import Any

import redis
import redis.asyncio
from celery import Celery, Task

from app import kombu_client
from workers.pool import AioTask

URL = os.environ.get("POOL_TEST_REDIS", "redis://not-set.invalid")


def create(url: str, late: bool = False) -> Celery:
    """The application. `late`: messages are acknowledged when the task ends, and kept by the broker until then."""
    celery = Celery("pool_test", broker=url, set_as_current=False)
    celery.conf.update(
        worker_pool="workers.pool:TaskPool",
        worker_disable_prefetch=not late,
        worker_prefetch_multiplier=4 if late else 1,
        task_acks_late=late,
        task_ignore_result=True,
        worker_send_task_events=True,
        worker_disable_rate_limits=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_soft_shutdown_timeout=float(os.environ.get("POOL_TEST_SOFT_SHUTDOWN", "0")),
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "ack_emulation": late,
            "queue_order_strategy": "priority",
            "sep": "|",
            "priority_steps": [0, 5],
            "socket_timeout": 10,
            "socket_connect_timeout": 2,
        },
    )
    return celery


kombu_client.install()
app = create(URL, bool(os.environ.get("POOL_TEST_LATE")))
# Not shared: the tests' process has other applications.
aio_task = functools.partial(app.task, base=AioTask, shared=False)
store = redis.asyncio.Redis.from_url(URL, socket_timeout=10)


async def say(task: Task, what: str) -> None:
    await store.rpush(f"log:{task.request.id}", what)


async def released(task: Task) -> None:
    while await store.blpop([f"release:{task.request.id}"], timeout=5) is None:
        pass


@aio_task(bind=True, name="hold")
async def hold(self: Task) -> None:
    """Wait to be released; a cancellation is passed on."""
    await say(self, "started")
    try:
        await released(self)
    except asyncio.CancelledError:
        await say(self, "cancelled")
        raise
    await say(self, "finished")


@aio_task(bind=True, name="clean_up")
async def clean_up(self: Task) -> str:
    """Be cancelled, and then clean up until released."""
    await say(self, "started")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await say(self, "cleaning")
        await released(self)
        await say(self, "clean")
    return "partial"


@aio_task(bind=True, name="fail")
async def fail(self: Task) -> None:
    await say(self, "started")
    async with asyncio.TaskGroup() as group:
        group.create_task(innermost())


async def innermost() -> None:
    await asyncio.sleep(0)
    raise ValueError("told to fail")


@aio_task(bind=True, name="again", max_retries=2)
async def again(self: Task) -> None:
    await say(self, f"try {self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=0)


@aio_task(bind=True, name="again_by_itself", autoretry_for=(ValueError,), retry_kwargs={"countdown": 0})
async def again_by_itself(self: Task) -> None:
    await say(self, f"try {self.request.retries}")
    if self.request.retries < 1:
        await innermost()


@aio_task(bind=True, name="who")
async def who(self: Task, *args: Any, **kwargs: Any) -> None:
    await asyncio.sleep(0)
    await say(self, f"{self.request.id} {self.request.args} {self.request.kwargs} {self.request.called_directly}")


@aio_task(bind=True, name="cancel_itself")
async def cancel_itself(self: Task) -> None:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.Event().wait()


@app.task(shared=False, bind=True, name="synchronous")
def synchronous(self: Task) -> None:
    """Block a thread until released."""
    with redis.Redis.from_url(URL, socket_timeout=10) as client:
        client.rpush(f"log:{self.request.id}", threading.current_thread().name)
        client.blpop([f"release:{self.request.id}"], timeout=9)
        client.rpush(f"log:{self.request.id}", "finished")


@aio_task(name="leave")
async def leave(code: int) -> None:
    sys.exit(code)


@aio_task(name="kill_loop")
async def kill_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.Event().wait()
