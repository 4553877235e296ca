"""The embedding store: its capacity at every moment, what it keeps, and what it says."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tensors import segment
from app.tensors.segment import Header
from workers.embeddings.store import NEW, EmbeddingStore, final

PAGE = segment.PAGE


def write(path: Path, identifier: str, payload: bytes, rename: bool = True) -> None:
    """What an engine does with a reserved file."""
    header = Header(
        name=identifier, nonce=segment.new_nonce(), dtype="uint8", shape=(len(payload),), nbytes=len(payload)
    )
    segment.fill(path, header, memoryview(payload))
    if rename:
        path.rename(final(path))


def put(store: EmbeddingStore, identifier: str, payload: bytes = b"x" * 100) -> Path | None:
    path = store.reserve(identifier, PAGE + len(payload))
    if path is None:
        return None
    write(path, identifier, payload)
    return store.commit(identifier)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


@pytest.fixture
def store(tmp_path: Path) -> EmbeddingStore:
    return EmbeddingStore(tmp_path / "store", 4 * (PAGE + 100))


def test_what_is_written_is_read_back(store: EmbeddingStore) -> None:
    path = store.reserve("a", PAGE + 5)
    assert path is not None and path.name.endswith(NEW)
    assert path.stat().st_size == PAGE + 5 == store.size
    assert not store.has("a") and store.path("a") is None
    write(path, "a", b"hello")
    stored = store.commit("a")
    assert stored is not None and stored == store.path("a") == final(path)
    assert bytes(segment.read_payload(stored, segment.read_header(stored))) == b"hello"
    assert (store.counts.stored, store.counts.hits, store.counts.misses) == (1, 1, 1)
    assert store.size == on_disk(store.directory)


def test_the_least_recently_used_goes_first(store: EmbeddingStore) -> None:
    gone: list[tuple[str, bool]] = []
    store.on_evict = lambda name: gone.append((name, (store.directory / segment.file_name(name)).exists()))
    for name in "abcd":
        assert put(store, name)
    store.path("a")
    store.path("b")
    assert put(store, "e") and put(store, "f")
    # Told of each while its file is still there.
    assert gone == [("c", True), ("d", True)]
    assert [name for name in "abcdef" if store.has(name)] == ["a", "b", "e", "f"]
    assert store.counts.evictions == 2 and store.size == on_disk(store.directory)


def test_held_items_stay_and_may_be_held_before_they_come(store: EmbeddingStore) -> None:
    for name in "abcd":
        store.hold(name)
        assert put(store, name)
    store.hold("a")
    assert put(store, "e") is None
    assert store.counts.full == 1 and store.counts.evictions == 0
    store.release("a")
    assert put(store, "e") is None
    store.release("a")
    assert put(store, "e")
    assert not store.has("a") and all(store.has(name) for name in "bcde")
    with pytest.raises(ValueError, match="more often"):
        store.release("a")


def test_nothing_is_evicted_for_an_item_that_cannot_fit_anyway(store: EmbeddingStore) -> None:
    for name in "abcd":
        assert put(store, name)
    store.hold("d")
    assert store.reserve("large", 4 * PAGE) is None
    assert all(store.has(name) for name in "abcd")


def test_too_large_is_counted_and_said_once_a_size(store: EmbeddingStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for extra in range(5):
            assert store.reserve(f"large{extra}", store.capacity + 1 + extra) is None
        assert store.reserve("huge", store.capacity * 16) is None
    assert store.counts.too_large == 6 and store.size == 0
    assert [f"{store.capacity} bytes" in record.message for record in caplog.records] == [True, True]


def test_capacity_zero_keeps_nothing(tmp_path: Path) -> None:
    store = EmbeddingStore(tmp_path, 0)
    assert put(store, "a") is None and store.counts.too_large == 1
    assert list(tmp_path.iterdir()) == []


def test_no_memory_is_not_an_error(store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, total: int) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment, "allocate", full)
    assert store.reserve("a", PAGE + 100) is None
    assert (store.counts.full, store.size, list(store.directory.iterdir())) == (1, 0, [])


@pytest.mark.parametrize("leave", ["nothing", "unwritten", "not renamed", "another's", "not a segment", "larger"])
def test_a_reservation_that_came_to_nothing_is_given_back(store: EmbeddingStore, leave: str) -> None:
    path = store.reserve("a", PAGE + 100)
    assert path is not None
    if leave == "nothing":
        path.unlink()
    elif leave == "not renamed":
        write(path, "a", b"x" * 100, rename=False)
    elif leave == "another's":
        write(path, "b", b"x" * 100)
    elif leave == "not a segment":
        path.write_bytes(b"\0" * (PAGE + 100))
        path.rename(final(path))
    elif leave == "larger":
        segment.allocate(final(path), PAGE + 200)
        write(final(path), "a", b"x" * 200, rename=False)
    assert store.commit("a") is None
    assert (store.size, list(store.directory.iterdir()), store.counts.stored) == (0, [], 0)
    with pytest.raises(ValueError, match="no reservation"):
        store.commit("a")
    assert put(store, "a")


@pytest.mark.parametrize("written", [False, True])
def test_abandoned(store: EmbeddingStore, written: bool) -> None:
    path = store.reserve("a", PAGE + 100)
    assert path is not None
    if written:
        write(path, "a", b"x" * 100)
    store.abandon("a")
    store.abandon("a")
    assert (store.size, list(store.directory.iterdir())) == (0, [])


def test_one_writer_an_item(store: EmbeddingStore) -> None:
    assert store.reserve("a", PAGE + 100) is not None
    assert store.reserve("a", PAGE + 100) is None and store.admit("a", PAGE + 100) is None
    store.abandon("a")
    assert put(store, "a")
    assert store.reserve("a", PAGE + 100) is None


def test_a_file_made_elsewhere_is_admitted(store: EmbeddingStore, tmp_path: Path) -> None:
    made = tmp_path / "theirs"
    segment.allocate(made, PAGE + 50)
    write(made, "a", b"y" * 50, rename=False)
    path = store.admit("a", PAGE + 100)
    assert path is not None and not path.exists() and store.size == PAGE + 100
    path.hardlink_to(made)
    assert store.commit("a") == path
    assert store.size == PAGE + 50
    store.remove("a")
    assert (store.size, store.has("a"), made.exists()) == (0, False, True)


def test_clear_and_leftovers(store: EmbeddingStore) -> None:
    gone: list[str] = []
    store.on_evict = gone.append
    put(store, "a")
    store.hold("a")
    store.reserve("b", PAGE + 1)
    store.clear()
    assert (store.size, len(store), gone, list(store.directory.iterdir())) == (0, 0, ["a"], [])
    put(store, "c")
    again = EmbeddingStore(store.directory, 100)
    assert (again.size, list(store.directory.iterdir())) == (0, [])


@pytest.mark.parametrize("identifier", ["../../etc/x", "/etc/passwd", "a" * 1000, "", "a\0b", "ünï"])
def test_no_name_reaches_the_file_system(store: EmbeddingStore, identifier: str) -> None:
    path = put(store, identifier)
    assert path is not None and path.parent == store.directory
    assert set(path.name) <= set("0123456789abcdef") and len(path.name) == 32


def test_ten_thousand_distinct_items(tmp_path: Path) -> None:
    """The folder never holds more than the capacity, whatever comes in."""
    rng = random.Random(3)
    evicted: list[str] = []
    store = EmbeddingStore(tmp_path, 20 * PAGE, evicted.append)
    held: list[str] = []
    stored = 0
    for number in range(10_000):
        name = f"item-{number}"
        if put(store, name, b"z" * rng.choice((1, 100, 3000, 9000))):
            stored += 1
            if rng.random() < 0.1:
                store.hold(name)
                held.append(name)
        if len(held) > 3:
            store.release(held.pop(rng.randrange(len(held))))
        assert store.size <= store.capacity
        assert number % 10 or on_disk(tmp_path) == store.size
        assert all(map(store.has, held))
    assert stored > 9_000 and store.counts.stored == stored
    assert store.counts.evictions == len(evicted) == stored - len(store)
    store.clear()
    assert list(tmp_path.iterdir()) == []


Names = st.sampled_from("abcdefgh")
Operations = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "write", "commit", "abandon", "admit", "hold", "release", "path", "remove"]),
        Names,
        st.integers(1, 20_000),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(operations=Operations, capacity=st.integers(0, 10 * 4096))
def test_any_order_of_operations(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str, int]], capacity: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    evicted: list[str] = []
    store = EmbeddingStore(folder, capacity, evicted.append)
    reserved: dict[str, Path] = {}
    held: dict[str, int] = {}
    lookups = removed = 0

    def do(what: str, name: str, size: int) -> None:
        nonlocal lookups, removed
        if what in ("reserve", "admit"):
            path = getattr(store, what)(name, PAGE + size)
            assert path is None or name not in reserved
            if path is not None:
                reserved[name] = path
        elif what == "write" and name in reserved and reserved[name].exists():
            write(reserved.pop(name), name, b"w" * (store._reserved[name] - PAGE))
            assert store.commit(name)
        elif what in ("commit", "abandon") and reserved.pop(name, None) is not None:
            assert getattr(store, what)(name) is None
        elif what == "hold":
            store.hold(name)
            held[name] = held.get(name, 0) + 1
        elif what == "release" and held.get(name):
            store.release(name)
            held[name] -= 1
        elif what == "path":
            lookups += 1
            assert (store.path(name) is not None) == store.has(name)
        elif what == "remove":
            removed += store.has(name)
            store.remove(name)

    for what, name, size in operations:
        kept = [
            one for one, times in held.items() if times and store.has(one) and not (what == "remove" and one == name)
        ]
        do(what, name, size)
        assert store.size <= capacity and on_disk(folder) <= store.size
        assert all(map(store.has, kept))
    counts = store.counts
    assert counts.hits + counts.misses == lookups
    assert counts.stored == len(store) + counts.evictions + removed
    assert len(evicted) == counts.evictions + removed


def test_a_failing_listener_loses_no_bytes(store: EmbeddingStore) -> None:
    put(store, "a")
    fail: Callable[[str], None] = {}.__getitem__
    store.on_evict = fail
    with pytest.raises(KeyError):
        store.remove("a")
    assert store.has("a") and store.size == on_disk(store.directory)


def test_what_leaves_may_be_deleted_later_and_its_name_be_used_again(store: EmbeddingStore) -> None:
    later: list[Path] = []
    store.delete = later.append
    put(store, "a", b"old")
    store.remove("a")
    assert put(store, "a", b"new")
    store.reserve("b", PAGE + 100)
    store.abandon("b")
    path = store.path("a")
    assert path is not None and len(later) == 2 and all(one.exists() for one in later)
    for one in later:
        one.unlink()
    assert bytes(segment.read_payload(path, segment.read_header(path))) == b"new"
    assert store.size == on_disk(store.directory)


def test_what_a_worker_had_not_deleted_yet_the_next_one_does(store: EmbeddingStore) -> None:
    store.delete = lambda path: None
    put(store, "a")
    store.remove("a")
    store.part("b").touch()
    assert len(list(store.directory.iterdir())) == 2
    EmbeddingStore(store.directory, 100)
    assert list(store.directory.iterdir()) == []


def test_what_is_to_be_kept_is_not_evicted(store: EmbeddingStore) -> None:
    for name in "abcd":
        assert put(store, name)
    assert store.admit("e", PAGE + 100, keep={"a", "b"}) and not store.has("c")
    assert store.admit("f", 2 * (PAGE + 100), keep={"a", "b"}) is None and store.has("d")
    assert (store.counts.full, store.make_room(store.capacity), store.counts.full) == (1, False, 1)


def test_whoever_waits_for_room_is_told_of_it(store: EmbeddingStore) -> None:
    told: list[int] = []
    store.on_room = lambda: told.append(store.capacity - store.size)
    store.hold("a")
    put(store, "a")
    store.release("a")
    store.reserve("b", PAGE + 100)
    store.abandon("b")
    store.remove("a")
    rest = store.capacity - PAGE - 100
    assert told == [rest, rest, rest, store.capacity]
