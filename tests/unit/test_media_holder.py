"""app.media.store, on a tensor plane that only notes what is asked of it. With the real one: tests/integration."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors.media import MediaMemoryFull
from app.errors.tensors import TensorError
from app.media import MediaHolder, store
from app.tensors import segment
from tests.planes import Plane
from tests.polling import until

A, B, C, D = "a" * 32, "b" * 32, "c" * 32, "d" * 32
PAGE = segment.PAGE


@pytest.fixture
def plane() -> Plane:
    return Plane()


@pytest.fixture
def holder(plane: Plane, tmp_path: Path) -> MediaHolder:
    return MediaHolder(plane, tmp_path, 100_000)


def nothing_left(holder: MediaHolder, plane: Plane, folder: Path) -> None:
    assert (len(holder), holder.size, plane.published, [*folder.iterdir()]) == (0, 0, {}, [])


async def test_the_bytes_lie_there_until_they_are_released(holder: MediaHolder, plane: Plane, tmp_path: Path) -> None:
    data = bytes(range(256)) * 10
    source = await holder.put(A, data, 60)
    assert plane.read(source) == data
    assert (source.name, source.dtype, source.shape, source.nbytes) == (A, "uint8", [2560], 2560)
    assert source.expires_at >= time.time() + 59
    assert holder.size == PAGE + 2560
    assert A not in source.path, "what may come from outside is no file name"
    holder.release(A)
    await holder.close()
    nothing_left(holder, plane, tmp_path)


async def test_it_stays_for_those_who_come_later(holder: MediaHolder, plane: Plane) -> None:
    first = await holder.put(A, b"x", 60)
    holder.release(A)
    assert (holder.users, len(holder), plane.read(first)) == (0, 1, b"x")
    assert (await holder.take(A, 60), await holder.put(A, b"x", 60)) == (first, first)
    assert (holder.users, plane.times) == (2, 1)
    assert await holder.take(B, 60) is None and holder.users == 2


async def test_the_least_recently_used_goes_when_room_is_needed(holder: MediaHolder, plane: Plane) -> None:
    for identity in (A, B, C):
        await holder.put(identity, bytes(25_000), 60)
        holder.release(identity)
    await holder.take(A, 60)
    holder.release(A)
    await holder.take(C, 60)
    await holder.put(D, bytes(25_000), 60)
    assert await holder.take(B, 60) is None
    assert await holder.take(A, 60) is not None and await holder.take(C, 60) is not None
    assert holder.size <= holder.capacity and len(plane.published) == 3


async def test_what_can_never_fit_drives_nothing_out(holder: MediaHolder) -> None:
    await holder.put(A, bytes(25_000), 60)
    holder.release(A)
    await holder.put(B, bytes(60_000), 60)
    for size in (100_001, 40_000):
        with pytest.raises(MediaMemoryFull):
            await holder.put(C, bytes(size), 60)
    assert await holder.take(A, 60) is not None


async def test_no_more_than_a_process_can_map(holder: MediaHolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST", 2)
    for identity in (A, B, C):
        await holder.put(identity, b"x", 60)
        holder.release(identity)
    assert (len(holder), await holder.take(A, 60)) == (2, None)


async def test_others_are_told_where_it_lies_and_that_it_is_gone(plane: Plane, tmp_path: Path) -> None:
    told: list[Any] = []
    places = SimpleNamespace(add=lambda *said: told.append(said), remove=told.append)
    holder = MediaHolder(plane, tmp_path, 100_000, places)
    first = await holder.put(A, bytes(60_000), 60)
    await holder.put(A, bytes(60_000), 60)
    later = await holder.put(A, bytes(60_000), 60 + 2 * store.SPARE_S)
    assert told == [(A, first), (A, later)]
    for _ in range(3):
        holder.release(A)
    second = await holder.put(B, bytes(60_000), 60)
    assert told[2:] == [A, (B, second)]


async def test_what_nobody_has_stays_readable(
    holder: MediaHolder, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "RENEW_S", 0.01)
    await holder.put(A, b"x", store.KEPT_S / 2 - store.SPARE_S - 1)
    holder.release(A)
    await holder.put(B, b"x", store.KEPT_S)
    keeping = asyncio.create_task(holder.keep_offered())
    await until(lambda: plane.times == 3, "the renewal")
    assert min(one.expires_at for one in plane.published.values()) > time.time() + store.KEPT_S
    plane.error = TensorError("no")
    monkeypatch.setattr(store, "KEPT_S", 10 * store.KEPT_S)
    await until(lambda: plane.times >= 6, "further attempts")
    assert not keeping.done()
    keeping.cancel()


async def test_who_has_it_too_keeps_it(holder: MediaHolder, plane: Plane, tmp_path: Path) -> None:
    first = await holder.put(A, b"x", 60)
    assert await holder.put(A, b"x", 60) == first
    assert (plane.times, len(holder), holder.size) == (1, 1, PAGE + 1)
    holder.release(A)
    assert (plane.read(first), holder.users) == (b"x", 1)
    holder.release(A)
    await holder.put(B, bytes(100_000 - PAGE), 60)
    assert holder.users == 1
    holder.release(B)
    again = await holder.put(A, b"x", 60)
    assert (again.path, again.nonce) != (first.path, first.nonce)


async def test_a_later_lease_is_a_longer_one(holder: MediaHolder, plane: Plane) -> None:
    first = await holder.put(A, b"x", 5)
    second = await holder.put(A, b"x", 5 + 10 * store.SPARE_S)
    assert second.expires_at >= time.time() + 4 + 10 * store.SPARE_S > first.expires_at
    assert (second.path, second.nonce, plane.times) == (first.path, first.nonce, 2)
    await holder.put(A, b"x", 5)
    assert plane.times == 2, "and covers shorter ones"


async def test_many_at_once_are_written_and_published_once(holder: MediaHolder, plane: Plane) -> None:
    plane.gate.clear()
    puts = [asyncio.create_task(holder.put(A, b"x" * 50_000, 60)) for _ in range(20)]
    await until(lambda: plane.times, "the publishing")
    plane.gate.set()
    assert len({source.nonce for source in await asyncio.gather(*puts)}) == 1
    assert (plane.times, holder.size) == (1, PAGE + 50_000)


async def test_what_does_not_fit_is_refused_and_fits_later(holder: MediaHolder, plane: Plane, tmp_path: Path) -> None:
    await holder.put(A, bytes(60_000), 60)
    with pytest.raises(MediaMemoryFull, match=r"tensors\.media_gb") as caught:
        await holder.put(B, bytes(60_000), 60)
    assert (caught.value.status, caught.value.failure().retry_after_s) == (503, 1)
    await holder.put(A, bytes(60_000), 60)  # what is there already takes no more room
    await holder.put(C, bytes(100_000 - 60_000 - 2 * PAGE), 60)
    assert holder.size == holder.capacity
    for identity in (A, A, C):
        holder.release(identity)
    await holder.put(B, bytes(60_000), 60)


async def test_who_never_releases_gives_its_room_up(
    holder: MediaHolder, plane: Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await holder.put(A, bytes(60_000), 5)
    await holder.put(A, bytes(60_000), 50)
    await holder.put(B, b"x", 500)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 49)
    with pytest.raises(MediaMemoryFull):
        await holder.put(C, bytes(60_000), 5)
    monkeypatch.setattr(time, "time", lambda: now + 51)
    with caplog.at_level(logging.WARNING):
        await holder.put(C, bytes(60_000), 5)
    assert f"medium {A} was not released" in caplog.text
    holder.release(A)  # late, and nothing wrong
    assert len(holder) == 2
    await holder.close()
    nothing_left(holder, plane, tmp_path)


async def test_a_client_that_leaves_while_it_is_written_leaves_nothing(
    holder: MediaHolder, plane: Plane, tmp_path: Path
) -> None:
    plane.gate.clear()
    leaving, staying = (asyncio.create_task(holder.put(A, b"x" * 50_000, 60)) for _ in range(2))
    await until(lambda: plane.times, "the publishing")
    leaving.cancel()
    await asyncio.wait({leaving})
    plane.gate.set()
    assert plane.read(await staying) == b"x" * 50_000
    assert holder.users == 1
    alone = asyncio.create_task(holder.put(B, b"y" * 50_000, 60))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.wait({alone})
    await until(lambda: holder.size == PAGE + 50_000, "the removal")
    await holder.close()
    nothing_left(holder, plane, tmp_path)


async def test_what_cannot_be_published_is_not_held(holder: MediaHolder, plane: Plane, tmp_path: Path) -> None:
    plane.error = TensorError("no room left in /dev/shm")
    with pytest.raises(TensorError, match="no room left") as caught:
        await holder.put(A, b"x", 60)
    assert "/dev/shm" not in caught.value.failure().message
    await until(lambda: not holder.size, "the removal")
    nothing_left(holder, plane, tmp_path)
    plane.error = None
    assert plane.read(await holder.put(A, b"x", 60)) == b"x"


async def test_memory_that_is_short_is_an_answer(
    plane: Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder = MediaHolder(plane, tmp_path / "gone", 100_000)
    both = await asyncio.gather(*(holder.put(A, b"x", 60) for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in both] == [MediaMemoryFull] * 2
    assert "gone" in caplog.text and all("gone" not in str(one) for one in both)
    await until(lambda: not holder.size, "the removal")


async def test_after_closing_nothing_is_taken(holder: MediaHolder, plane: Plane, tmp_path: Path) -> None:
    plane.gate.clear()
    coming = asyncio.create_task(holder.put(A, b"x", 60))
    await until(lambda: plane.times, "the publishing")
    closing = asyncio.create_task(holder.close())
    await asyncio.sleep(0)
    plane.gate.set()
    await closing
    await asyncio.wait({coming})
    nothing_left(holder, plane, tmp_path)
    with pytest.raises(MediaMemoryFull, match="stopping"):
        await holder.put(B, b"x", 60)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("pPrR"), st.sampled_from([A, B, C]), st.integers(1, 40_000)), max_size=30))
def test_any_order_of_requests(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]]) -> None:
    """Whatever comes and goes, alone or several at once: counts are right, and the end is empty."""
    folder = tmp_path_factory.mktemp("media")

    async def run() -> None:
        plane = Plane()
        holder = MediaHolder(plane, folder, 100_000)
        users = dict.fromkeys((A, B, C), 0)
        sizes: dict[str, int] = {}

        async def put(identity: str, size: int) -> None:
            size = sizes.setdefault(identity, size)
            try:
                source = await holder.put(identity, bytes(size), 60)
            except MediaMemoryFull:
                return
            users[identity] += 1
            assert len(plane.read(source)) == size

        for what, identity, size in steps:
            if what == "p":
                await put(identity, size)
            elif what == "P":
                await asyncio.gather(*(put(one, size) for one in (identity, B, identity)))
            elif users[identity]:
                users[identity] -= 1
                holder.release(identity)
            in_use = sum(size + PAGE for one, size in sizes.items() if users[one])
            assert (holder.users, holder._in_use) == (sum(users.values()), in_use)
            assert in_use <= holder.size <= holder.capacity
        for identity, number in users.items():
            for _ in range(number):
                holder.release(identity)
        assert (holder.users, holder._in_use) == (0, 0)
        await holder.put("f" * 32, bytes(holder.capacity - PAGE), 60)
        assert len(holder) == 1
        await holder.close()
        nothing_left(holder, plane, folder)

    asyncio.run(run())


async def test_a_plane_that_does_not_answer_does_not_hold_the_end_up(
    holder: MediaHolder, plane: Plane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = asyncio.Event()

    async def hang(_: Path) -> None:
        await never.wait()

    await holder.put(A, b"x", 60)
    monkeypatch.setattr(plane, "withdraw", hang)
    monkeypatch.setattr(store, "CLOSE_S", 0.1)
    await asyncio.wait_for(holder.close(), 5)
    assert "1 media are not withdrawn" in caplog.text
    never.set()
    await until(lambda: not holder.size, "the removal")
