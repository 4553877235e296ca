"""app.fleet: what a process knows of the workers, from a real registry."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app import fleet
from app.fleet import FleetView
from app.messages.plans import Assignment
from app.redis import connect
from app.registry import Registry
from app.roles import ALL
from tests.messages import AGG, worker
from tests.polling import until
from tests.redis_server import redis_server

NEW = Assignment(worker=AGG.worker, incarnation="a2")


class View:
    def __init__(self, redis: Any, lease_s: float = 60.0) -> None:
        self.registry = Registry(redis, lease_s)
        self.lost: list[Assignment] = []
        self.fleet = FleetView(self.registry, "m", self.lost.append)

    @property
    def ids(self) -> list[str]:
        return [one.id for one in self.fleet.now.workers]


@asynccontextmanager
async def watching(view: View) -> AsyncIterator[None]:
    task = asyncio.create_task(view.fleet.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "REFRESH_S", 0.02)


async def test_workers_of_the_model_are_seen(redis: Any) -> None:
    view = View(redis)
    assert (view.ids, view.fleet.reachable) == ([], False)
    await view.registry.announce(worker(AGG, *ALL))
    await view.registry.announce(worker(Assignment(worker="other", incarnation="1"), *ALL, model="n"))
    await view.fleet.refresh()
    assert (view.ids, view.fleet.reachable) == ([AGG.worker], True)


@pytest.mark.usefixtures("quick")
async def test_a_missing_worker_takes_nothing_new_at_once_and_is_lost_after_a_grace_period(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "GRACE_HEARTBEATS", 0.5)
    view = View(redis)
    await view.registry.announce(worker(AGG, *ALL))
    async with watching(view):
        await until(lambda: view.ids, "the worker")
        await view.registry.remove(AGG.worker)
        began = time.monotonic()
        await until(lambda: not view.ids, "the worker's end")
        assert view.lost == []
        await until(lambda: view.lost, "its loss")
        assert 0.4 < time.monotonic() - began < 3
        await asyncio.sleep(0.1)
    assert view.lost == [AGG], "said once"


@pytest.mark.usefixtures("quick")
async def test_one_that_comes_back_in_time_was_never_lost(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that was restarted empty: the next heartbeat announces the same incarnation again."""
    monkeypatch.setattr(fleet, "GRACE_HEARTBEATS", 0.3)
    view = View(redis)
    await view.registry.announce(worker(AGG, *ALL))
    async with watching(view):
        await until(lambda: view.ids, "the worker")
        await redis.flushall()
        await until(lambda: not view.ids, "the worker's end")
        await view.registry.announce(worker(AGG, *ALL))
        await until(lambda: view.ids, "the worker again")
        await asyncio.sleep(0.5)
        assert view.lost == []


@pytest.mark.usefixtures("quick")
async def test_one_that_was_started_anew_is_lost_at_once(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "GRACE_HEARTBEATS", 60.0)
    view = View(redis)
    await view.registry.announce(worker(AGG, *ALL))
    async with watching(view):
        await until(lambda: view.ids, "the worker")
        await view.registry.announce(worker(NEW, *ALL))
        await until(lambda: view.lost == [AGG], "the loss of the old one", 2)
        assert view.fleet.now.find(NEW.worker, NEW.incarnation) is not None


@pytest.mark.usefixtures("quick")
async def test_a_lease_that_ends_is_a_missing_worker(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "GRACE_HEARTBEATS", 0.1)
    view = View(redis, lease_s=0.3)
    await view.registry.announce(worker(AGG, *ALL))
    async with watching(view):
        await until(lambda: view.lost == [AGG], "the loss", 5)


@pytest.mark.usefixtures("quick")
async def test_no_redis_leaves_the_view_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "GRACE_HEARTBEATS", 0.1)
    with redis_server() as server:
        redis = connect(server.url, 0.5, name="test")
        view = View(redis)
        await view.registry.announce(worker(AGG, *ALL))
        async with watching(view):
            await until(lambda: view.ids, "the worker")
            server.stop()
            await until(lambda: not view.fleet.reachable, "that Redis is away")
            await asyncio.sleep(0.3)
            assert (view.ids, view.lost) == ([AGG.worker], []), "a worker is not lost because Redis is"
            server.start()
            await until(lambda: view.fleet.reachable, "that Redis is back")
            await until(lambda: view.lost == [AGG], "the loss of a worker that does not come back")
        await redis.aclose()


async def test_a_worker_that_is_not_known_is_looked_for_once(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(redis)
    await view.fleet.refresh()
    looks, look = 0, view.registry.workers

    async def counted() -> Any:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0.05)
        return await look()

    monkeypatch.setattr(view.registry, "workers", counted)
    await view.registry.announce(worker(AGG, *ALL))
    asked = await asyncio.gather(*(view.fleet.knows(AGG) for _ in range(100)))
    assert asked == [True] * 100 and looks <= 2, "one under way, and one for those who asked meanwhile"
    before = looks
    asked = await asyncio.gather(*(view.fleet.knows(NEW) for _ in range(100)))
    assert not any(asked) and looks <= before + 2
    before = looks
    assert not await view.fleet.knows(NEW) and looks == before
    await view.registry.announce(worker(NEW, *ALL))
    await view.fleet.refresh()
    assert await view.fleet.knows(NEW)


async def test_a_look_that_began_before_the_question_is_no_answer(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    view, go, began = View(redis), asyncio.Event(), asyncio.Event()
    look = view.registry.workers

    async def slow() -> Any:
        found = await look()
        began.set()
        await go.wait()
        return found

    monkeypatch.setattr(view.registry, "workers", slow)
    early = asyncio.create_task(view.fleet.knows(NEW))
    await until(began.is_set, "the first look")
    await view.registry.announce(worker(AGG, *ALL))
    late = asyncio.create_task(view.fleet.knows(AGG))
    await asyncio.sleep(0)
    go.set()
    assert [*await asyncio.gather(early, late)] == [False, True]


@pytest.mark.parametrize("adapter", ["", "sql@v1"])
async def test_a_worker_that_came_up_a_moment_ago_suffices(redis: Any, adapter: str) -> None:
    """Whoever heard that all are ready may ask before this view has seen it."""
    view = View(redis)
    await view.fleet.refresh()
    await view.registry.announce(worker(AGG, *ALL, adapters=["sql@v1"]))
    assert view.ids == []
    found = await view.fleet.holding(adapter, lambda fleet: not fleet.missing(False))
    assert [one.id for one in found.workers] == view.ids == [AGG.worker]


async def test_nobody_is_given_up_because_redis_is_away() -> None:
    with redis_server() as server:
        redis = connect(server.url, 0.5, name="test")
        view = View(redis)
        server.stop()
        assert await view.fleet.knows(AGG)
        await redis.aclose()
