"""app.items.announcements: who is told, and what a lost connection must not lose; and many workers over one index."""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app import keys
from app.errors.base import Failure
from app.errors.media import MediaRefused
from app.errors.serving import EncodeFailed
from app.items.announcements import Announcements, announcement, is_final
from app.items.index import ItemIndex, Outcome
from app.messages.plans import Assignment
from app.redis import connect
from app.settings_sections import ItemSettings
from tests.items import E0, MODEL, descriptor, identity, record
from tests.polling import until
from tests.redis_server import redis_server

ONE, TWO = identity(1), identity(2)
FAILED = EncodeFailed("out of memory").failure()
REFUSED = MediaRefused("no image").failure()


async def wait(heard: Announcements, namespace: str, of: str, timeout_s: float) -> Failure | None:
    with heard.watch(namespace, of) as watch:
        return await watch.wait(timeout_s)


@asynccontextmanager
async def listening(redis: Any) -> AsyncIterator[Announcements]:
    heard = Announcements(redis)
    task = asyncio.create_task(heard.run())
    await asyncio.wait_for(heard.subscribed.wait(), 5)
    try:
        yield heard
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def say(redis: Any, failure: Failure | None = None, of: str = ONE, model: str = MODEL) -> int:
    return int(await redis.publish(keys.ITEMS_CHANNEL, announcement(model, of, E0, failure)))


async def timed(waiting: Any) -> tuple[Failure | None, float]:
    began = time.monotonic()
    return await waiting, time.monotonic() - began


async def test_hundreds_that_wait_are_told_and_no_other(redis: Any) -> None:
    async with listening(redis) as heard:
        waiting = [asyncio.create_task(wait(heard, MODEL, ONE, 30)) for _ in range(300)]
        others = [asyncio.create_task(wait(heard, model, of, 30)) for model, of in ((MODEL, TWO), ("another", ONE))]
        await asyncio.sleep(0)
        await say(redis)
        async with asyncio.timeout(5):
            assert await asyncio.gather(*waiting) == [None] * 300
        await say(redis, of=ONE)
        await until(lambda: not heard._watches.get((MODEL, ONE)), "the end of all watches")
        assert not any(task.done() for task in others)
        await say(redis, FAILED, of=TWO)
        await say(redis, REFUSED, model="another")
        async with asyncio.timeout(5):
            assert await asyncio.gather(*others) == [FAILED, REFUSED]
        assert heard._watches == {}
        assert [is_final(failure) for failure in (FAILED, REFUSED)] == [False, True]


async def test_the_time_is_up(redis: Any) -> None:
    async with listening(redis) as heard:
        failure, took = await timed(wait(heard, MODEL, ONE, 0.1))
        assert failure is None and 0.1 <= took < 5
        assert heard._watches == {}


async def test_what_is_announced_before_the_wait_is_remembered(redis: Any) -> None:
    async with listening(redis) as heard, contextlib.AsyncExitStack() as stack:
        watch = stack.enter_context(heard.watch(MODEL, ONE))
        later = stack.enter_context(heard.watch(MODEL, TWO))
        await say(redis, FAILED)
        await say(redis, of=TWO)
        assert await later.wait(10) is None
        failure, took = await timed(watch.wait(10))
        assert failure == FAILED and took < 5
        failure, took = await timed(watch.wait(0.1))
        assert failure is None and took >= 0.1, "and told once"
        await say(redis)
        failure, took = await timed(watch.wait(10))
        assert failure is None and took < 5


@pytest.mark.parametrize(
    ("said", "told"), [((FAILED, None), None), ((None, FAILED), FAILED), ((REFUSED, None, FAILED), REFUSED)]
)
async def test_the_last_of_several_counts_but_for_the_items_own_fault(
    redis: Any, said: tuple[Failure | None, ...], told: Failure | None
) -> None:
    async with listening(redis) as heard:
        with heard.watch(MODEL, ONE) as watch, heard.watch(MODEL, TWO) as after:
            for failure in said:
                await say(redis, failure)
            await say(redis, of=TWO)
            await after.wait(5)
            assert await watch.wait(5) == told


async def test_a_waiter_that_is_cancelled_leaves_nothing(redis: Any) -> None:
    async with listening(redis) as heard:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await wait(heard, MODEL, ONE, 30)
        assert heard._watches == {}


async def test_what_was_said_while_the_connection_was_down(redis: Any) -> None:
    async with listening(redis) as heard:
        with heard.watch(MODEL, ONE) as watch:
            pipe = redis.pipeline(transaction=True)
            pipe.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            pipe.publish(keys.ITEMS_CHANNEL, announcement(MODEL, ONE, E0))
            _, receivers = await pipe.execute()
            assert receivers == 0, "the message was not lost, so this test shows nothing"
            failure, took = await timed(watch.wait(20))
            assert failure is None and took < 10, "not told to look again"
            await say(redis, FAILED)
            assert await watch.wait(10) == FAILED


async def test_a_restart_of_redis() -> None:
    with redis_server() as server:
        redis = connect(server.url, 2.0, name="test")
        async with listening(redis) as heard:
            with heard.watch(MODEL, ONE) as watch:
                server.restart()
                failure, took = await timed(watch.wait(30))
                assert failure is None and took < 20
                await asyncio.wait_for(heard.subscribed.wait(), 10)
                await say(redis, FAILED)
                assert await watch.wait(10) == FAILED
        await redis.aclose()


@pytest.mark.parametrize("said", [b"\xff\xfe", b"null", b'{"identity": 1}', b'{"x": "\xff"}'])
async def test_what_cannot_be_read_lets_all_look_and_is_said_once(
    redis: Any, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(redis) as heard:
        with caplog.at_level(logging.ERROR), heard.watch(MODEL, ONE) as watch:
            for _ in range(2):
                await redis.publish(keys.ITEMS_CHANNEL, said)
                failure, took = await timed(watch.wait(20))
                assert failure is None and took < 10
            await say(redis, FAILED)
            assert await watch.wait(10) == FAILED
        assert len(caplog.records) == 1


async def test_the_loss_of_a_worker_can_wake_all(redis: Any) -> None:
    async with listening(redis) as heard:
        waiting = asyncio.create_task(wait(heard, MODEL, ONE, 30))
        await asyncio.sleep(0)
        heard.wake()
        async with asyncio.timeout(5):
            assert await waiting is None


class Cluster:
    """What the test knows, and no worker: who lives, and who is encoding what."""

    def __init__(self, seed: int, crashes: float, gives_up: float, wait_s: float) -> None:
        self.dice = random.Random(seed)
        self.crashes = crashes
        self.gives_up = gives_up
        self.wait_s = wait_s
        self.alive: set[Assignment] = set()
        self.encoding: dict[str, set[Assignment]] = defaultdict(set)
        self.seen: Counter[str] = Counter()

    def lives(self, worker: Assignment) -> bool:
        return worker in self.alive


class Worker:
    """Wants items one after the other; starts anew when it has crashed."""

    def __init__(self, cluster: Cluster, index: ItemIndex, heard: Announcements, name: str) -> None:
        self.cluster = cluster
        self.index = index
        self.heard = heard
        self.me = Assignment(worker=name, incarnation="0")
        cluster.alive.add(self.me)

    async def run(self, items: list[str]) -> None:
        for item in items:
            while not await self.get(item):
                self.cluster.seen["looked again"] += 1

    async def get(self, item: str) -> bool:
        """Whether a living worker is known to hold it."""
        with self.heard.watch(MODEL, item) as watch:
            found = (await self.index.find([item]))[item]
            holders = [Assignment(worker=name, incarnation=one.incarnation) for name, one in found.holders.items()]
            if found.record is not None and any(map(self.cluster.lives, holders)):
                return True
            for gone in holders:
                if not self.cluster.lives(gone):
                    await self.index.withdraw(item, gone.worker, gone.incarnation)
            dead = found.claim if found.claim and not self.cluster.lives(found.claim) else None
            answer = await self.index.claim(item, self.me, 60, instead_of=dead)
            if answer.outcome is Outcome.YOURS:
                self.cluster.seen["took over"] += dead is not None
                await self.encode(item)
            elif answer.outcome is Outcome.CLAIMED:
                await watch.wait(self.cluster.wait_s)
        return False

    async def encode(self, item: str) -> None:
        cluster, me = self.cluster, self.me
        assert await self.index.owns(item, me)
        cluster.encoding[item].add(me)
        await asyncio.sleep(cluster.dice.random() * 0.02)
        living = set(filter(cluster.lives, cluster.encoding[item]))
        assert living == {me}, f"{item} is encoded by {living} at once"
        chance = cluster.dice.random()
        if chance < cluster.crashes:
            cluster.seen["crashed"] += 1
            cluster.alive.remove(me)
            self.me = Assignment(worker=me.worker, incarnation=str(int(me.incarnation) + 1))
            cluster.alive.add(self.me)
            return
        # Before Redis is told: from then on another may begin.
        cluster.encoding[item].remove(me)
        if chance < cluster.crashes + cluster.gives_up:
            cluster.seen["gave up"] += 1
            await self.index.give_up(item, me, FAILED)
        else:
            cluster.seen["encoded"] += 1
            await self.index.publish(item, me, record(item), descriptor(item, me))


async def everybody_gets_everything(cluster: Cluster, redis: Any, url: str) -> list[str]:
    """50 workers in 5 processes, as far as Redis can tell, want 20 items in an order of their own."""
    items = [identity(n) for n in range(20)]
    async with contextlib.AsyncExitStack() as stack:
        workers: list[Worker] = []
        for process in range(5):
            client = connect(url, 5.0, name=f"process {process}")
            stack.push_async_callback(client.aclose)
            heard = await stack.enter_async_context(listening(client))
            index = ItemIndex(client, MODEL, ItemSettings())
            workers += [Worker(cluster, index, heard, f"w{process}.{n}") for n in range(10)]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.run(cluster.dice.sample(items, len(items))))
    known = await ItemIndex(redis, MODEL, ItemSettings()).find(items)
    for item in items:
        assert known[item].record == record(item)
        assert known[item].holders
    return items


async def test_without_faults_each_item_is_encoded_once_and_nobody_waits_for_a_timeout(
    redis: Any, redis_url: str
) -> None:
    cluster = Cluster(0, crashes=0.0, gives_up=0.0, wait_s=45.0)
    began = time.monotonic()
    await everybody_gets_everything(cluster, redis, redis_url)
    assert cluster.seen["encoded"] == 20
    assert time.monotonic() - began < 30
    assert await redis.keys(keys.encoding(MODEL, "*")) == []


@pytest.mark.parametrize("seed", range(4))
async def test_crashes_and_failures_neither_lose_an_item_nor_let_two_living_workers_encode_it(
    redis: Any, redis_url: str, seed: int
) -> None:
    cluster = Cluster(seed, crashes=0.3, gives_up=0.3, wait_s=0.1)
    await everybody_gets_everything(cluster, redis, redis_url)
    seen = cluster.seen
    assert seen["encoded"] >= 20
    assert seen["crashed"] and seen["gave up"] and seen["took over"], seen
