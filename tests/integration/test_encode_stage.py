"""workers.stages.encode and the task around it: whoever waits for an item hears of it, whatever becomes of the task."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from app import cancellation, keys
from app.errors.serving import EncodeFailed
from app.items.index import Found
from app.messages.media import MediaRef
from app.messages.plans import Assignment
from app.messages.tasks import EncodeTask
from app.roles import Role
from app.sender import envelope, envelope_of, opened
from tests.integration.item_cluster import PD, Cluster, E, Worker
from tests.items import heard, identity
from tests.polling import until
from workers.stages import encode as encode_stage

OTHER = Assignment(worker="encode@9", incarnation="x")


@pytest.fixture
async def encode(cluster: Cluster) -> Worker:
    """An encode worker that takes only what it is given."""
    made = await cluster.worker("encode@0", E)
    await made.stop_taking()
    return made


async def task(cluster: Cluster, encode: Worker, number: int = 1, **changes: Any) -> bytes:
    """The message of an encode task whose item is claimed for this worker."""
    ref: MediaRef = changes.pop("item", None) or await cluster.api.ref(number)
    await encode.items.index.claim(ref.identity, encode.me, 30)
    fields = {
        "request_id": "r",
        "attempt": 0,
        "api": "api-1",
        "model": "m",
        "deadline": time.time() + 60,
        "item": ref,
        "assigned": encode.me,
    }
    return envelope("encode", EncodeTask(**fields | changes), "encode.encode@0")


async def found(cluster: Cluster, number: int = 1) -> Found:
    known: Found = (await cluster.index.find([identity(number)]))[identity(number)]
    return known


async def said(cluster: Cluster, encode: Worker, *contents: bytes) -> list[Any]:
    """The failures (None for none) that are announced while these tasks run at once."""
    heard_of = await heard(cluster.redis, _run(cluster, encode, contents))
    return [one["failure"] and one["failure"]["code"] for one in heard_of]


async def _run(cluster: Cluster, encode: Worker, contents: tuple[bytes, ...]) -> None:
    running = [asyncio.create_task(encode.run_task(content)) for content in contents]
    await asyncio.gather(*running)
    await until(lambda: not encode.items._running, "the end of what is said")


async def test_an_item_is_encoded_and_announced(cluster: Cluster, encode: Worker) -> None:
    there = encode.me.model_dump() | {"rank": 0, "prefilling": 0, "prefill_tokens": 0, "kv_blocks": 0}
    places = {"turn": 1, "places": {identity(1): there, "prefill": there}}
    await cluster.redis.hset(keys.placed("api-1"), "r", json.dumps(places))
    await cluster.redis.hset(keys.load(encode.me.worker, encode.me.incarnation), "requests", 2)
    assert await said(cluster, encode, await task(cluster, encode)) == [None]
    known = await found(cluster)
    assert known.claim is None and set(known.holders) == {"encode@0"}
    assert known.record is not None and known.record.worker == "encode@0"
    assert encode.engine.encodes == {identity(1): 1}
    assert json.loads(await cluster.redis.hget(keys.placed("api-1"), "r"))["places"] == {"prefill": there}
    assert await cluster.redis.hget(keys.load(encode.me.worker, encode.me.incarnation), "requests") == b"1"
    await cluster.quiet()


async def test_items_are_encoded_at_the_same_time(cluster: Cluster, encode: Worker) -> None:
    encode.engine.gate.clear()
    contents = [await task(cluster, encode, number, request_id=f"r{number}") for number in range(8)]
    running = asyncio.create_task(_run(cluster, encode, tuple(contents)))
    await until(lambda: encode.engine.at_the_gate == 8, "all to be in the engine")
    assert len(encode.host.jobs) == 8
    encode.engine.gate.set()
    await running
    await cluster.quiet()


@pytest.mark.parametrize("requests", [("r", "r"), ("r", "s")], ids=["of one request", "of two"])
async def test_what_is_queued_twice_is_encoded_once(cluster: Cluster, encode: Worker, requests: Any) -> None:
    contents = [await task(cluster, encode, request_id=one) for one in requests]
    assert await said(cluster, encode, *contents) == [None], "and nobody hears of a failure"
    assert encode.engine.encodes == {identity(1): 1}
    assert (await found(cluster)).claim is None
    await cluster.quiet()


async def test_a_claim_that_was_lost_is_no_work_any_more(cluster: Cluster, encode: Worker) -> None:
    content = await task(cluster, encode)
    await cluster.index.claim(identity(1), OTHER, 30, instead_of=encode.me)
    assert await said(cluster, encode, content) == []
    assert not encode.engine.renderer.calls and (await found(cluster)).claim == OTHER
    await cluster.index.give_up(identity(1), OTHER)
    await cluster.quiet()


async def test_a_task_for_an_older_incarnation_is_left_alone(cluster: Cluster, encode: Worker) -> None:
    old = Assignment(worker="encode@0", incarnation="old")
    # The claim of this incarnation is another task's.
    content = await task(cluster, encode, assigned=old, deadline=time.time() - 1)
    assert await said(cluster, encode, content) == []
    assert not encode.engine.renderer.calls and (await found(cluster)).claim == encode.me
    await cluster.index.give_up(identity(1), encode.me)
    await cluster.quiet()


@pytest.mark.parametrize("over", ["cancelled", "past its deadline"])
async def test_a_request_that_is_over_leaves_the_item_to_others(cluster: Cluster, encode: Worker, over: str) -> None:
    late = time.time() - 1 if over == "past its deadline" else time.time() + 60
    content = await task(cluster, encode, deadline=late)
    if over == "cancelled":
        await cancellation.cancel(cluster.redis, "r")
    assert await said(cluster, encode, content) == [None]
    known = await found(cluster)
    assert known == Found() and not encode.engine.renderer.calls
    await cluster.quiet()


async def test_an_encode_that_began_is_not_ended_by_its_requests_deadline(cluster: Cluster, encode: Worker) -> None:
    """Others may be waiting for it."""

    async def not_over() -> bool:
        return False

    _, message = opened(await task(cluster, encode, deadline=time.time() - 1))
    await encode_stage.run(encode.host, EncodeTask.model_validate(message), not_over)
    assert await cluster.holders(1) == {"encode@0"}
    await cluster.quiet()


async def test_an_encode_that_hangs_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.encode_timeout_s = 0.5
    encode = await cluster.worker("encode@0", E)
    await encode.stop_taking()
    encode.engine.gate.clear()
    assert await said(cluster, encode, await task(cluster, encode)) == ["encode_failed"]
    assert (encode.engine.at_the_gate, (await found(cluster)).claim) == (0, None)
    await cluster.quiet()


@pytest.mark.parametrize("of", ["processor", "engine", "store", "connector", "index"])
async def test_what_goes_wrong_is_announced(cluster: Cluster, encode: Worker, of: str) -> None:
    if of == "processor":
        encode.engine.renderer.refused.add(identity(1))
    elif of == "engine":
        encode.engine.fault = EncodeFailed("out of memory")
    elif of == "store":
        encode.engine.renderer.large[identity(1)] = 80
        encode.store.capacity = 5000
    elif of == "connector":
        encode.engine.saves = False
    else:
        encode.items.index._max_record_kb = 0
    code = {"processor": "invalid_media", "index": "record_too_large"}.get(of, "encode_failed")
    assert await said(cluster, encode, await task(cluster, encode)) == [code]
    assert await found(cluster) == Found()
    assert encode.engine.encodes.total() == (of in ("connector", "index"))
    await cluster.quiet()


async def test_what_nobody_thought_of_is_announced_and_logged(cluster: Cluster, encode: Worker) -> None:
    encode.engine.fault = ZeroDivisionError()
    content = await task(cluster, encode)

    async def failing() -> None:
        with pytest.raises(ZeroDivisionError):  # for Celery, which logs it
            await encode.run_task(content)
        await until(lambda: not encode.items._running, "the end of what is said")

    (one,) = await heard(cluster.redis, failing())
    assert one["failure"]["code"] == "encode_failed" and "ZeroDivisionError" in one["failure"]["message"]
    await cluster.quiet()


async def test_what_is_here_already_is_announced_again(cluster: Cluster, encode: Worker) -> None:
    await said(cluster, encode, await task(cluster, encode))
    await cluster.index.withdraw(identity(1), "encode@0")
    assert await said(cluster, encode, await task(cluster, encode, request_id="s")) == [None]
    assert encode.engine.encodes == {identity(1): 1} and await cluster.holders(1) == {"encode@0"}
    await cluster.quiet()


async def test_the_end_of_an_api_process_ends_its_encodes(cluster: Cluster, encode: Worker) -> None:
    encode.engine.gate.clear()
    content = await task(cluster, encode)

    async def ended() -> None:
        running = asyncio.create_task(encode.run_task(content))
        await until(lambda: encode.engine.at_the_gate, "the encode")
        encode.host.jobs.cancel_of("api-1")
        await asyncio.wait([running])
        await until(lambda: not encode.items._running, "the end of what is said")

    (one,) = await heard(cluster.redis, ended())
    assert one["failure"] is None, "others may ask for it at once, with bytes of their own"
    assert (await found(cluster)) == Found() and encode.engine.at_the_gate == 0
    await cluster.quiet()


async def test_a_message_that_is_none_harms_nothing(cluster: Cluster, encode: Worker) -> None:
    content = envelope_of("encode", {"message": {"request_id": "r", "api": "api-1", "deadline": "soon"}}, "q", "")
    assert await said(cluster, encode, content) == []
    await cluster.quiet()


async def test_a_worker_that_drains_gives_its_queue_back(cluster: Cluster, encode: Worker) -> None:
    for number in range(3):
        queue = keys.worker_queue(Role.ENCODE, "encode@0")
        await cluster.redis.lpush(queue, await task(cluster, encode, number))
    failures = [one["failure"] for one in await heard(cluster.redis, encode.drain())]
    assert [one["code"] for one in failures] == ["worker_lost"] * 3
    await cluster.quiet()


async def test_hundreds_of_tasks_for_a_few_items(cluster: Cluster, encode: Worker) -> None:
    pd = await cluster.worker("pd@0", PD)
    contents = [await task(cluster, encode, at % 5, request_id=f"r{at}") for at in range(200)]
    await _run(cluster, encode, tuple(contents))
    assert encode.engine.encodes == {identity(at): 1 for at in range(5)}
    await cluster.ask(pd, *range(5))
    assert pd.local.counts.fetched == 5
    await cluster.quiet()
