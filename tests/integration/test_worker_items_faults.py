"""Items of prompts when workers fail, die or have no room: every request is answered, and nothing stays behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app import cancellation, keys
from app import fleet as fleet_view
from app.errors.media import MediaExpired, MediaRefused
from app.errors.serving import BrokerUnavailable, EncodeFailed, WorkerLost
from app.messages.plans import Assignment
from app.messages.prompts import Prompt
from app.roles import Role
from tests.integration.item_cluster import ENCODES, PD, Cluster, E, Worker, taker
from tests.integration.item_cluster import cluster as run_cluster
from tests.items import identity
from tests.messages import worker
from tests.polling import until
from tests.redis_server import RedisServer, redis_server
from workers import tasks
from workers.items import finder as finding

FAILED = EncodeFailed("out of memory")


async def busy(cluster: Cluster, one: Worker) -> None:
    """Let the API choose another."""
    await cluster.redis.hset(keys.load(one.me.worker, one.me.incarnation), "requests", 1)


@pytest.mark.parametrize("failing", [1, 2])
async def test_what_an_encode_worker_fails_with_another_one_does_and_then_this_worker(
    cluster: Cluster, failing: int
) -> None:
    encoders = [await cluster.worker(f"encode@{at}", E) for at in range(2)]
    pd = await cluster.worker("pd@0", PD)
    await busy(cluster, encoders[1])
    for one in encoders[:failing]:
        one.engine.fault = FAILED
    await asyncio.gather(*(cluster.ask(pd, 1) for _ in range(5)))
    answering = pd if failing == 2 else encoders[1]
    assert cluster.encodes() == answering.engine.encodes == {identity(1): 1}
    assert (pd.counts.sent_again, pd.counts.fallbacks, pd.counts.encoded_here) == (1, failing - 1, failing - 1)
    await cluster.quiet()


@pytest.mark.parametrize("dead", [1, 2])
async def test_a_dead_encode_worker_is_noticed(cluster: Cluster, dead: int) -> None:
    encoders = [await cluster.worker(f"encode@{at}", E) for at in range(2)]
    pd = await cluster.worker("pd@0", PD)
    await busy(cluster, encoders[1])
    encoders[0].engine.gate.clear()
    asking = [asyncio.create_task(cluster.ask(pd, 1)) for _ in range(5)]
    await until(lambda: pd.counts.waited == 5 and encoders[0].engine.at_the_gate, "all to wait")
    for one in encoders[:dead]:
        await one.die()
    async with asyncio.timeout(cluster.encode_timeout_s / 2):
        await asyncio.gather(*asking)
    answering = pd if dead == 2 else encoders[1]
    assert cluster.encodes() == answering.engine.encodes == {identity(1): 1}
    assert pd.counts.fallbacks == dead - 1
    await cluster.quiet()


async def test_a_worker_that_was_replaced_is_noticed_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "LOOK_AGAIN_S", 1000.0)
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    await encode.stop_taking()
    asking = asyncio.create_task(cluster.ask(pd, 1))
    await until(lambda: pd.counts.waited, "the wait")
    await encode.die()
    await encode.host.registry.announce(worker(Assignment(worker="encode@0", incarnation="new"), Role.ENCODE))
    async with asyncio.timeout(cluster.encode_timeout_s / 2):
        await asking
    await cluster.quiet()


async def test_a_task_that_was_lost_is_made_up_for_once(cluster: Cluster) -> None:
    """Its worker lives, and whoever waits cannot know."""
    cluster.encode_timeout_s = 2.0
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    await encode.stop_taking()
    began = time.monotonic()
    await asyncio.gather(*(cluster.ask(pd, 1) for _ in range(10)))
    assert time.monotonic() - began >= 1.9
    assert cluster.encodes() == pd.engine.encodes == {identity(1): 1}
    assert (pd.counts.fallbacks, pd.counts.encoded_here) == (1, 1)
    assert await cluster.holders(1) == {"pd@0"}
    await cluster.quiet()


async def test_the_end_of_one_request_does_not_keep_its_encode_worker_from_the_next(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    await encode.stop_taking()
    prompt = await cluster.api.prompt(1)
    await cluster.api.place(pd.items.fleet.now, pd.items.fingerprint, prompt, "gone")
    asking = asyncio.create_task(cluster.ask(pd, 1))
    await until(lambda: pd.counts.waited, "the wait")
    await cancellation.cancel(cluster.redis, "gone")
    encode.take()
    await asking
    assert (pd.counts.sent_again, pd.counts.fallbacks, encode.engine.encodes[identity(1)]) == (1, 0, 1)
    await cluster.quiet()


async def test_bytes_that_are_gone_are_one_requests_trouble(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    prompt = await cluster.api.prompt(1)
    gone = prompt.media[0].source.model_copy(update={"expires_at": time.time() - 1})
    late = prompt.model_copy(update={"media": [prompt.media[0].model_copy(update={"source": gone})]})
    await encode.stop_taking()
    first = asyncio.create_task(cluster.ask(pd, prompt=late))
    await until(lambda: pd.counts.waited, "the wait")
    second = asyncio.create_task(cluster.ask(pd, 1))
    await until(lambda: pd.counts.waited == 2, "the wait")
    encode.take()
    await second
    assert encode.engine.encodes == {identity(1): 1}
    # The first may have had it from the second, or not.
    await asyncio.gather(first, return_exceptions=True)
    with pytest.raises(MediaExpired):
        await cluster.ask(pd, prompt=late.model_copy(update={"media": [_other(late.media[0], 2)]}))
    await cluster.quiet()


def _other(ref: Any, number: int) -> Any:
    return ref.model_copy(update={"identity": identity(number)})


@pytest.fixture
async def own_redis(
    vllm: Any, shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RedisServer, Cluster]]:
    """A cluster whose Redis may be stopped."""
    monkeypatch.setattr(tasks, "current", taker.get)
    with redis_server() as server:
        async with run_cluster(shared_memory, tmp_path, server.url) as made:
            yield server, made


def _sees(one: Worker, workers: int) -> bool:
    return len(one.items.fleet.now.workers) == workers


async def back(cluster: Cluster) -> None:
    """Wait until the workers have found their Redis again."""
    for one in cluster.workers:
        await until(one.items._announcements.subscribed.is_set, "the subscription")
        await until(partial(_sees, one, len(cluster.workers)), "the workers")


async def test_requests_of_a_redis_that_is_away_fail_and_those_after_it_do_not(
    own_redis: tuple[RedisServer, Cluster],
) -> None:
    server, cluster = own_redis
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    await cluster.ask(pd, 1)
    encode.engine.gate.clear()
    asking = [asyncio.create_task(cluster.ask(pd, 2, 3)) for _ in range(5)]
    await until(lambda: pd.counts.waited == 11 and encode.engine.at_the_gate == 2, "all to wait")
    server.stop()
    errors = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(one) for one in errors} == {BrokerUnavailable}
    await cluster.ask(pd, 1, placed=False)
    encode.engine.gate.set()
    await until(lambda: not encode.tasks, "the end of the encodes")
    server.start()
    await back(cluster)
    await cluster.ask(pd, 2, 3, 4)
    assert encode.engine.encodes == {identity(at): 1 for at in (1, 2, 3, 4)}, "it had kept what it could not announce"
    await cluster.quiet()


async def test_an_answer_does_not_depend_on_what_the_cluster_hears(own_redis: tuple[RedisServer, Cluster]) -> None:
    server, cluster = own_redis
    agg = await cluster.worker("agg@0", ENCODES)
    agg.engine.gate.clear()
    asking = asyncio.create_task(cluster.ask(agg, 1))
    await until(lambda: agg.engine.at_the_gate, "the encode")
    server.stop()
    agg.engine.gate.set()
    await asking
    server.start()
    await back(cluster)
    await cluster.ask(agg, 1, 2)
    assert agg.engine.encodes == {identity(1): 1, identity(2): 1}
    await cluster.quiet()


async def test_a_worker_that_ends_takes_its_entries_along(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    await cluster.ask(pd, 1, 2, 3)
    await cluster.quiet()
    index = encode.items.index
    await pd.close()
    for number in (1, 2, 3):
        assert set((await index.find([identity(number)]))[identity(number)].holders) == {"encode@0"}
    assert not pd.items._running and not [*pd.registry.collect()]


async def test_an_encode_worker_that_drains_leaves_its_queue_to_others(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    await encode.stop_taking()
    asking = asyncio.create_task(cluster.ask(pd, 1))
    await until(lambda: pd.counts.waited, "the wait")
    await encode.drain()
    async with asyncio.timeout(cluster.encode_timeout_s / 2):
        await asking
    assert pd.engine.encodes == {identity(1): 1}
    await cluster.quiet()


async def test_a_dead_engine_of_an_encode_worker_is_another_way_to_fail(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    encode.engine.fault = WorkerLost("the worker's engine died")
    await cluster.ask(pd, 1)
    assert pd.engine.encodes == {identity(1): 1}
    await cluster.quiet()


async def test_an_owner_that_this_worker_does_not_know_yet_is_looked_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd = await cluster.worker("pd@0", PD)
    view, look = pd.items.fleet, pd.items.fleet._registry.workers
    looks = 0

    async def counted() -> Any:
        nonlocal looks
        looks += 1
        return await look()

    monkeypatch.setattr(fleet_view, "REFRESH_S", 1000.0)
    await asyncio.sleep(0.6)
    encode = await cluster.worker("encode@0", E)
    await encode.stop_taking()
    view.now = type(view.now)()
    monkeypatch.setattr(view._registry, "workers", counted)
    await cluster.index.claim(identity(1), encode.me, 30)
    prompt = await cluster.api.prompt(1)
    asking = [asyncio.create_task(cluster.ask(pd, placed=False, prompt=prompt)) for _ in range(50)]
    await until(lambda: pd.counts.waited == 50, "all to wait for it")
    assert looks <= 3
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await cluster.index.give_up(identity(1), encode.me)
    dead = Assignment(worker="encode@9", incarnation="gone")
    before = looks
    assert [await view.knows(dead) for _ in range(100)] == [False] * 100
    assert looks == before + 1
    await cluster.quiet()


async def test_a_modality_that_the_model_does_not_take_is_refused(cluster: Cluster) -> None:
    agg = await cluster.worker("agg@0", ENCODES)
    del agg.items.encoder.widths["image"]
    with pytest.raises(MediaRefused) as caught:
        await cluster.ask(agg, 1)
    assert caught.value.param == "messages[0].content[0]"
    await cluster.quiet()


async def bytes_less(cluster: Cluster, *numbers: int) -> Prompt:
    """A prompt of items that somebody had when the API looked."""
    prompt = await cluster.api.prompt(*numbers)
    return prompt.model_copy(update={"media": [ref.model_copy(update={"source": None}) for ref in prompt.media]})


@pytest.mark.parametrize("roles", [(E, PD), (ENCODES, ENCODES)])
async def test_items_that_somebody_has_need_no_bytes(cluster: Cluster, roles: Any) -> None:
    """Here, with another worker, and both in one prompt with one that has its bytes."""
    one, two = [await cluster.worker(f"w@{at}", role) for at, role in enumerate(roles)]
    await cluster.ask(two, 1)
    await cluster.ask(two, 2)
    prompt = await bytes_less(cluster, 1, 2)
    await cluster.ask(two, prompt=prompt, placed=False)
    three = await cluster.worker("w@3", PD)
    await cluster.ask(three, prompt=prompt, placed=False)
    mixed = prompt.model_copy(update={"media": [prompt.media[0], *(await cluster.api.prompt(4)).media]})
    await cluster.ask(three, prompt=mixed, placed=False)
    assert cluster.encodes() == {identity(1): 1, identity(2): 1, identity(4): 1}
    assert one.dead is False
    await cluster.quiet()


@pytest.mark.parametrize("splices", [True, False])
async def test_items_that_are_gone_are_said_to_be(cluster: Cluster, splices: bool) -> None:
    """At once, with encode workers about or without, and nobody else has to wait for it."""
    await cluster.worker("encode@0", E)
    pd = await cluster.worker("pd@0", PD, splices=splices)
    for prompt in (await bytes_less(cluster, 1), await bytes_less(cluster, 1, 2)):
        async with asyncio.timeout(cluster.encode_timeout_s / 3):
            with pytest.raises(MediaExpired) as caught:
                await cluster.ask(pd, prompt=prompt, placed=False)
        assert (caught.value.code, caught.value.status) == ("media_expired", 503)
        assert str(caught.value.param).startswith("messages[0].content[")
    assert cluster.encodes() == {}
    await cluster.ask(pd, 1)
    await cluster.quiet()


async def test_an_item_that_is_being_encoded_is_waited_for_without_its_bytes(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    encode.engine.gate.clear()
    first = asyncio.create_task(cluster.ask(pd, 1))
    await until(lambda: encode.engine.at_the_gate, "the encode")
    second = asyncio.create_task(cluster.ask(pd, prompt=await bytes_less(cluster, 1), placed=False))
    await until(lambda: pd.counts.waited == 2, "the wait")
    encode.engine.gate.set()
    await asyncio.gather(first, second)
    await cluster.quiet()
