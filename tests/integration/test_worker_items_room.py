"""Stores with less room than is asked for at once: who can wait does, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.tensors import segment
from tests.integration.item_cluster import ENCODES, PD, Cluster, E
from tests.integration.item_engine import ITEM
from tests.items import identity
from tests.messages import decode_task
from tests.polling import until
from workers import media_loading
from workers.embeddings import room as rooms
from workers.items.encoder import AT_ONCE
from workers.items.untaken import LOOK_S

#: Less than the time that an item is kept for others who do not come.
SOON_S = rooms.UNTAKEN_S * 0.8


def never_more(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check after each allocation that no store has more than its capacity."""
    allocate = segment.allocate

    def checked(path: Path, total: int) -> None:
        allocate(path, total)
        for one in cluster.workers:
            found = on_disk(path.parent)
            if path.parent == one.store.directory and found > one.store.capacity:
                raise AssertionError(f"{found} bytes of {one.store.capacity}")

    monkeypatch.setattr(segment, "allocate", checked)


def on_disk(folder: Path) -> int:
    """By inode: files are renamed, and go, meanwhile."""
    sizes = {}
    for at in folder.iterdir():
        with suppress(FileNotFoundError):
            status = at.stat()
            if at.is_file():
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


@pytest.mark.parametrize("size", [1, 2, 3], ids="{}_items_a_prompt".format)
async def test_20_items_at_once_in_stores_with_room_for_3(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    never_more(cluster, monkeypatch)
    encode, pd = await cluster.worker("encode@0", E, room=3), await cluster.worker("pd@0", PD, room=3)
    numbers = [*range(18)] + ([18, 19] if size < 3 else [])
    prompts = [await cluster.api.prompt(*numbers[at : at + size]) for at in range(0, len(numbers), size)]
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*(cluster.ask(pd, prompt=prompt) for prompt in prompts))
    assert encode.engine.encodes == cluster.encodes() == Counter(map(identity, numbers))
    assert (pd.counts.fallbacks, pd.counts.no_room, pd.counts.sent_again) == (0, 0, 0)
    assert encode.store.counts.full == pd.store.counts.full == 0
    await cluster.quiet()


async def test_prompts_do_not_wait_for_what_each_other_holds(cluster: Cluster) -> None:
    """All items are there for the taking, and any three prompts could each take one of them and want another."""
    await cluster.worker("encode@0", E)
    pd = await cluster.worker("pd@0", PD, room=3)
    other = await cluster.worker("pd@1", PD)
    for at in range(20):
        await cluster.ask(other, at)
    async with asyncio.timeout(SOON_S):
        for step in range(1, 5):
            pairs = [(at, (at + step) % 20) for at in range(20)]
            await asyncio.gather(*(cluster.ask(pd, *pair) for pair in pairs))
    assert cluster.encodes() == {identity(at): 1 for at in range(20)}
    assert (pd.counts.fallbacks, pd.counts.no_room) == (0, 0)
    await cluster.quiet()


async def test_a_prompt_waits_for_the_end_of_another_one(cluster: Cluster) -> None:
    await cluster.worker("encode@0", E)
    pd = await cluster.worker("pd@0", PD, room=2)
    async with pd.host.prompts.ready(decode_task("r"), await cluster.api.prompt(1, 2)) as ready:
        await pd.engine.run(ready.engine_input)
        waiting = [asyncio.create_task(cluster.ask(pd, 3)) for _ in range(5)]
        await until(lambda: len(pd.local.room._queue) == 5, "all to wait")
        # What is there does not wait.
        await cluster.ask(pd, 1)
        assert not any(one.done() for one in waiting)
    await asyncio.gather(*waiting)
    assert (pd.counts.fallbacks, pd.counts.no_room, cluster.encodes()[identity(3)]) == (0, 0, 1)
    await cluster.quiet()


async def test_a_prompt_that_is_cancelled_while_it_waits_leaves_its_turn(cluster: Cluster) -> None:
    await cluster.worker("encode@0", E)
    pd = await cluster.worker("pd@0", PD, room=2)
    async with pd.host.prompts.ready(decode_task("r"), await cluster.api.prompt(1, 2)):
        waiting = [asyncio.create_task(cluster.ask(pd, 3, 4)), asyncio.create_task(cluster.ask(pd, 5))]
        await until(lambda: len(pd.local.room._queue) == 2, "both to wait")
        waiting[0].cancel()
    await waiting[1]
    await cluster.quiet()


@pytest.mark.parametrize("roles", [[E, PD], [ENCODES, ENCODES]], ids=["e_pd", "agg"])
async def test_a_prompt_larger_than_the_store_does_not_wait(cluster: Cluster, roles: list[Any]) -> None:
    first, last = [await cluster.worker(f"w@{at}", one, room=3 if at else 100) for at, one in enumerate(roles)]
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*(cluster.ask(last, *range(5)) for _ in range(10)))
        await cluster.ask(last, 7)
    assert last.engine.encodes.total() > 1, "what does not fit is encoded with the prompt"
    await cluster.quiet()


async def test_an_encode_worker_keeps_what_nobody_has_read_yet(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E, room=2), await cluster.worker("pd@0", PD)
    await encode.stop_taking()
    prompt, fleet = await cluster.api.prompt(*range(5)), pd.items.fleet.now
    await cluster.api.place(fleet, pd.items.fingerprint, prompt, "r")
    encode.take()
    await until(lambda: len(encode.local.room._queue) == 3, "three to wait for room")
    await asyncio.sleep(3 * LOOK_S)
    assert encode.engine.encodes.total() == len(encode.store) == 2 and encode.store.counts.evictions == 0
    async with asyncio.timeout(SOON_S):
        await cluster.ask(pd, prompt=prompt, placed=False)
    assert encode.engine.encodes == Counter({identity(at): 1 for at in range(5)})
    assert pd.counts.fallbacks == 0
    await cluster.quiet()


async def test_what_nobody_reads_is_not_kept_for_ever(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "UNTAKEN_S", 0.2)
    encode, pd = await cluster.worker("encode@0", E, room=2), await cluster.worker("pd@0", PD)
    await cluster.api.place(pd.items.fleet.now, pd.items.fingerprint, await cluster.api.prompt(*range(5)), "r")
    await until(lambda: encode.engine.encodes.total() == 5, "all encodes")
    await cluster.quiet()


async def test_few_items_are_decoded_at_a_time(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    encode.engine.gate.clear()
    asking = asyncio.create_task(cluster.ask(pd, *range(10)))
    more = [asyncio.create_task(cluster.ask(pd, *range(at, at + 10))) for at in range(10, 60, 10)]
    await until(lambda: encode.engine.at_the_gate == AT_ONCE, "as many as may")
    await until(lambda: len(encode.host.jobs) == 60, "all tasks to have begun")
    assert encode.engine.renderer.calls.total() == AT_ONCE
    encode.engine.gate.set()
    await asyncio.gather(asking, *more)
    assert cluster.encodes().total() == 60
    await cluster.quiet()


@pytest.mark.parametrize("splices", [True, False])
async def test_decoded_media_have_a_bound(cluster: Cluster, splices: bool) -> None:
    """Of prompts here, rendered in either way, which nobody else bounds. Pictures have 8 x 8 pixels of three bytes."""
    agg = await cluster.worker("agg@0", ENCODES, splices=splices)
    renderer, decoded = agg.engine.renderer, agg.items.encoder.decoded
    decoded._limit = 3 * 192
    renderer.gate.clear()
    asking = [asyncio.create_task(cluster.ask(agg, at)) for at in range(8)]
    await until(lambda: decoded.used == 3 * 192 and decoded._turn.locked(), "the bound, and somebody to wait")
    assert renderer.calls.total() <= 3
    renderer.gate.set()
    await asyncio.gather(*asking)
    assert renderer.calls.total() == 8
    decoded._limit = 10
    await cluster.ask(agg, *range(8, 11))  # larger than all of it
    await cluster.quiet()


async def test_who_leaves_has_memory_for_as_long_as_something_is_decoded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    agg = await cluster.worker("agg@0", ENCODES)
    going, decode, decoded = threading.Event(), media_loading.load, agg.items.encoder.decoded

    def slow(*arguments: Any) -> Any:
        going.wait(10)
        return decode(*arguments)

    async def take() -> None:
        async with agg.items.encoder.loaded((await cluster.api.prompt(1)).media):
            raise AssertionError("nobody is here any more")

    monkeypatch.setattr(media_loading, "load", slow)
    taking = asyncio.create_task(take())
    await until(lambda: decoded.used == 192, "a medium in memory")
    taking.cancel()
    await asyncio.wait([taking], timeout=0.2)
    assert decoded.used == 192
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert decoded.used == 0


async def test_memory_is_allocated_and_given_back_off_the_loop(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    agg = await cluster.worker("agg@0", ENCODES, room=2)
    threads: list[threading.Thread] = []
    allocate, unlink = segment.allocate, Path.unlink

    def noted(path: Path, total: int) -> None:
        threads.append(threading.current_thread())
        allocate(path, total)

    def noted_unlink(path: Path, *arguments: Any, **more: Any) -> None:
        if path.parent == agg.store.directory and path.exists():
            threads.append(threading.current_thread())
        unlink(path, *arguments, **more)

    monkeypatch.setattr(segment, "allocate", noted)
    monkeypatch.setattr(Path, "unlink", noted_unlink)
    for number in range(4):
        await cluster.ask(agg, number)
    await cluster.quiet()
    assert agg.store.counts.evictions == 2 and len(threads) == 6
    assert threading.main_thread() not in threads


async def test_an_allocation_that_is_cancelled_or_fails_leaves_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    agg = await cluster.worker("agg@0", ENCODES, room=2)
    allocate, go, begun = segment.allocate, threading.Event(), threading.Event()

    def slow(path: Path, total: int) -> None:
        begun.set()
        assert go.wait(10)
        allocate(path, total)

    monkeypatch.setattr(segment, "allocate", slow)
    asking = asyncio.create_task(cluster.ask(agg, 1))
    await asyncio.to_thread(begun.wait, 10)
    assert agg.store.size == ITEM
    asking.cancel()
    go.set()
    await cluster.quiet()
    assert agg.store.size == 0 and not agg.engine.encodes

    def full(path: Path, total: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment, "allocate", full)
    await cluster.ask(agg, 1)
    assert (agg.store.counts.full, agg.store.size, agg.engine.encodes) == (1, 0, {identity(1): 1})
    await cluster.quiet()
