"""app.items.index: its scripts in a real Redis."""

import asyncio
import json
import logging
from typing import Any

import pytest

from app import keys
from app.errors.media import MediaRefused
from app.errors.serving import EncodeFailed, RecordTooLarge
from app.items.index import Found, Holder, ItemIndex, Outcome
from app.messages.plans import Assignment
from app.redis import connect
from app.settings_sections import ItemSettings
from tests.items import E0, MODEL, descriptor, heard, identity, publish, record
from tests.polling import until

ONE, TWO, THREE = (identity(n) for n in range(3))
E0_AGAIN = Assignment(worker="encode@gpu0", incarnation="e1")
E1 = Assignment(worker="encode@gpu1", incarnation="x")
ITEM, HELD, CLAIM = keys.item(MODEL, ONE), keys.embedding(MODEL, ONE), keys.encoding(MODEL, ONE)


@pytest.fixture
def index(redis: Any) -> ItemIndex:
    return ItemIndex(redis, MODEL, ItemSettings())


async def found(index: ItemIndex, of: str = ONE) -> Found:
    return (await index.find([of]))[of]


async def test_what_is_published_is_found_by_another_process(index: ItemIndex, redis_url: str) -> None:
    other = connect(redis_url, 5.0, name="another process")
    await index.claim(ONE, E0, 60)
    await publish(index, E0, ONE)
    await publish(index, E1, TWO)
    await ItemIndex(other, MODEL, ItemSettings()).add_holder(TWO, E0, descriptor(TWO, E0))
    known = await ItemIndex(other, MODEL, ItemSettings()).find([TWO, ONE, THREE, ONE])
    held = {one.worker: Holder(incarnation=one.incarnation, descriptor=descriptor(TWO, one)) for one in (E0, E1)}
    assert known == {
        TWO: Found(record(TWO), held, None),
        ONE: Found(record(ONE), {E0.worker: Holder(incarnation="e0", descriptor=descriptor(ONE, E0))}, None),
        THREE: Found(),
    }
    assert await ItemIndex(other, "another model", ItemSettings()).find([ONE]) == {ONE: Found()}
    assert await index.find([]) == {}
    await other.aclose()


async def test_redis_cli_can_read_it(index: ItemIndex, redis: Any) -> None:
    await index.claim(TWO, E1, 60)
    await publish(index, E0, ONE)
    assert json.loads(await redis.get(ITEM))["replacement"] == [[5, 1], [7, 64], [6, 1]]
    holder = json.loads(await redis.hget(HELD, E0.worker))
    assert (holder["incarnation"], holder["descriptor"]["path"]) == ("e0", f"/dev/shm/{ONE}")
    claim = json.loads(await redis.get(keys.encoding(MODEL, TWO)))
    assert (claim["worker"], claim["incarnation"]) == (E1.worker, E1.incarnation)


async def test_use_by_any_process_renews_the_life_of_record_and_holders(
    index: ItemIndex, redis: Any, redis_url: str
) -> None:
    other = connect(redis_url, 5.0, name="another process")
    await publish(index, E0, ONE)
    await index.claim(TWO, E0, 30)
    for user in (index, ItemIndex(other, MODEL, ItemSettings(record_ttl_s=1000))):
        for key in (ITEM, HELD):
            await redis.expire(key, 5)
        await user.find([ONE, TWO, THREE])
        expected = 86400 if user is index else 1000
        for key in (ITEM, HELD):
            assert expected - 2 <= await redis.ttl(key) <= expected
    assert await redis.ttl(keys.encoding(MODEL, TWO)) <= 30, "a claim is not renewed by those who wait for it"
    await other.aclose()


async def test_every_key_ends_by_itself(index: ItemIndex, redis: Any) -> None:
    await index.claim(ONE, E0, 60)
    await publish(index, E0, TWO)
    await index.add_holder(THREE, E0, descriptor(THREE, E0))
    names = await redis.keys("*")
    assert len(names) == 4
    assert all([0 < await redis.ttl(name) <= 86400 for name in names])


async def test_one_of_many_gets_the_claim(index: ItemIndex, redis_url: str) -> None:
    other = connect(redis_url, 5.0, name="another process")
    indexes = [index, ItemIndex(other, MODEL, ItemSettings())]
    owners = [Assignment(worker=f"w{n}", incarnation="1") for n in range(50)]
    answers = await asyncio.gather(*(indexes[n % 2].claim(ONE, owner, 60) for n, owner in enumerate(owners)))
    won = [owner for owner, answer in zip(owners, answers, strict=True) if answer.outcome is Outcome.YOURS]
    assert len(won) == 1
    assert {answer.found.claim for answer in answers} == set(won)
    assert [answer.outcome for answer in answers].count(Outcome.CLAIMED) == 49
    assert [owner for owner in owners if await index.owns(ONE, owner)] == won
    await other.aclose()


async def test_a_claim_of_the_same_owner_is_not_made_twice(index: ItemIndex) -> None:
    """Somebody has told the worker already: telling it again would be a second encode."""
    assert (await index.claim(ONE, E0, 60)).outcome is Outcome.YOURS
    assert (await index.claim(ONE, E0, 60)).outcome is Outcome.CLAIMED


async def test_a_claim_that_was_sent_twice_is_made_once(index: ItemIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """As redis-py does when the connection breaks before the answer comes."""
    run, answers = index._scripts.run, []

    async def twice(*call: Any) -> Any:
        answers.append(await run(*call))
        return await run(*call)

    with monkeypatch.context() as patch:
        patch.setattr(index._scripts, "run", twice)
        assert (await index.claim(ONE, E0, 60)).outcome is Outcome.YOURS
    assert answers[0][0] == b"yours"
    assert (await index.claim(ONE, E0, 60)).outcome is Outcome.CLAIMED


async def test_what_is_held_is_not_claimed(index: ItemIndex, redis: Any) -> None:
    await publish(index, E0, ONE)
    answer = await index.claim(ONE, E1, 60)
    assert (answer.outcome, answer.found) == (Outcome.HELD, await found(index))
    assert not await redis.exists(CLAIM)


async def test_a_record_without_holder_and_a_holder_without_record_are_claimed(index: ItemIndex, redis: Any) -> None:
    await publish(index, E0, ONE)
    assert await index.withdraw(ONE, E0.worker)
    answer = await index.claim(ONE, E1, 60)
    assert (answer.outcome, answer.found) == (Outcome.YOURS, Found(record(ONE), {}, E1))
    await publish(index, E1, TWO)
    await redis.delete(keys.item(MODEL, TWO))
    assert (await index.claim(TWO, E0, 60)).outcome is Outcome.YOURS


async def test_a_dead_owners_claim_is_taken_over_once(index: ItemIndex) -> None:
    await index.claim(ONE, E0, 60)
    assert (await index.claim(ONE, E1, 60, instead_of=E0_AGAIN)).found.claim == E0, "another incarnation's stays"
    owners = [Assignment(worker=f"w{n}", incarnation="1") for n in range(20)]
    answers = await asyncio.gather(*(index.claim(ONE, owner, 60, instead_of=E0) for owner in owners))
    assert [answer.outcome for answer in answers].count(Outcome.YOURS) == 1
    assert not await index.owns(ONE, E0)


async def test_a_claim_runs_out(index: ItemIndex) -> None:
    await index.claim(ONE, E0, 0.1)

    async def gone() -> bool:
        return not await index.owns(ONE, E0)

    await until(gone, "the end of the claim", 5)
    assert (await index.claim(ONE, E1, 60)).outcome is Outcome.YOURS


async def test_a_caller_that_is_cancelled_leaves_no_claim(index: ItemIndex, redis: Any) -> None:
    """Its client has left, and nobody will tell the worker."""

    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(keys.ITEMS_CHANNEL)
        await pubsub.get_message(timeout=5)
        asking = asyncio.create_task(index.claim(TWO, E0, 60))
        for _ in range(2):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        said = json.loads((await pubsub.get_message(timeout=5))["data"])
    assert (said["identity"], said["failure"]) == (TWO, None), "waiters look again"
    assert not await redis.exists(keys.encoding(MODEL, TWO))


async def test_publishing_ends_ones_own_claim_and_announces(index: ItemIndex, redis: Any) -> None:
    await index.claim(ONE, E0, 60)
    (said,) = await heard(redis, publish(index, E0, ONE))
    assert said == {"model": MODEL, "identity": ONE, "worker": E0.worker, "incarnation": "e0", "failure": None}
    assert not await redis.exists(CLAIM)
    await index.claim(TWO, E1, 60)
    (said,) = await heard(redis, publish(index, E0, TWO))
    assert said["worker"] == E0.worker
    assert await index.owns(TWO, E1), "who took it over is at work"


@pytest.mark.parametrize(("over", "large"), [(-1, False), (0, False), (1, True)])
async def test_the_bound_of_a_record(redis: Any, over: int, large: bool) -> None:
    bound = ItemIndex(redis, MODEL, ItemSettings(max_record_kb=2))
    await bound.claim(ONE, E0, 60)
    spare = 2048 - len(record(ONE, revision="").model_dump_json().encode())
    one = record(ONE, revision="r" * (spare + over))
    if not large:
        await bound.publish(ONE, E0, one, descriptor(ONE, E0))
        assert (await found(bound)).record == one
        return
    with pytest.raises(RecordTooLarge, match=f"{ONE} has 2049 bytes.*max_record_kb \\(2\\)"):
        await bound.publish(ONE, E0, one, descriptor(ONE, E0))
    assert await found(bound) == Found(None, {}, E0)


async def test_a_newer_incarnations_entry_is_not_withdrawn(index: ItemIndex) -> None:
    await publish(index, E0, ONE)
    await publish(index, E0_AGAIN, ONE)
    assert not await index.withdraw(ONE, E0.worker, "e0")
    assert (await found(index)).holders[E0.worker].incarnation == "e1"
    assert await index.withdraw(ONE, E0.worker, "e1")
    assert not await index.withdraw(ONE, E0.worker, "e1")
    assert (await found(index)).holders == {}


async def test_an_entry_that_was_made_anew_is_not_withdrawn(index: ItemIndex) -> None:
    """A reader found the buffer gone, and the holder has encoded the item again meanwhile."""
    await publish(index, E0, ONE)
    await index.add_holder(ONE, E0, descriptor(ONE, E0, nonce="1" * 16))
    assert not await index.withdraw(ONE, E0.worker, E0.incarnation, "0" * 16)
    assert await index.withdraw(ONE, E0.worker, E0.incarnation, "1" * 16)


async def test_a_worker_that_leaves_takes_its_entries_along(index: ItemIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.items.index.WITHDRAWN_AT_ONCE", 7)
    items = [identity(n) for n in range(30)]
    await asyncio.gather(*(publish(index, E0, one) for one in items[:20]))
    await publish(index, E0_AGAIN, items[20])
    await index.add_holder(items[0], E1, descriptor(items[0], E1))
    assert await index.withdraw_all(E0.worker, items, E0.incarnation) == 20
    known = await index.find(items)
    assert {one: set(known[one].holders) for one in items if known[one].holders} == {
        items[0]: {E1.worker},
        items[20]: {E0.worker},
    }
    assert await index.withdraw_all(E0.worker, items) == 1
    assert await index.withdraw_all(E0.worker, []) == 0


async def test_giving_up_ends_ones_own_claim_and_says_why(index: ItemIndex, redis: Any) -> None:
    await index.claim(ONE, E0, 60)
    failure = EncodeFailed("out of memory").failure()
    (said,) = await heard(redis, index.give_up(ONE, E0, failure))
    expected = {"status": 503, "code": "encode_failed", "message": "out of memory", "final": False, "retry_after_s": 1}
    assert {name: value for name, value in said["failure"].items() if value is not None} == expected
    assert (await index.claim(ONE, E1, 60)).outcome is Outcome.YOURS


async def test_who_lost_the_claim_says_only_what_holds_for_the_other_too(index: ItemIndex, redis: Any) -> None:
    await index.claim(ONE, E1, 60)
    assert await heard(redis, index.give_up(ONE, E0, EncodeFailed("died").failure())) == []
    refused = MediaRefused("no image", param="messages[3]").failure()
    (said,) = await heard(redis, index.give_up(ONE, E0, refused))
    assert (said["failure"]["status"], said["failure"]["final"]) == (400, True)
    assert "messages[3]" not in json.dumps(said), "another request has it elsewhere"
    assert await index.owns(ONE, E1)


@pytest.mark.parametrize("written", [b"\xff\xfe", b"null", b"[1]", b'{"worker": 1}', b'{"from": "the future"}'])
async def test_what_cannot_be_read_is_absent_and_said_once(
    index: ItemIndex, redis: Any, written: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await redis.set(ITEM, written)
    await redis.hset(HELD, mapping={"w1": written, "w2": written})
    await redis.set(CLAIM, written)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert await found(index) == Found()
    assert len(caplog.records) == 3, "one for each kind"
    assert not await index.owns(ONE, E0)
    assert not await index.withdraw(ONE, "w1", "i")
    answer = await index.claim(ONE, E0, 60)
    assert (answer.outcome, answer.found) == (Outcome.YOURS, Found(None, {}, E0))
    await publish(index, E0, ONE)
    assert await found(index) == Found(record(ONE), {E0.worker: (await found(index)).holders[E0.worker]}, None)
    assert await index.withdraw(ONE, "w1")


async def test_the_routers_claims_are_plain_assignments(index: ItemIndex, redis: Any) -> None:
    await redis.set(CLAIM, E0.model_dump_json(), px=60_000)
    assert await index.owns(ONE, E0)
    assert (await index.claim(ONE, E1, 60)).found.claim == E0
    assert (await index.claim(ONE, E1, 60, instead_of=E0)).outcome is Outcome.YOURS
