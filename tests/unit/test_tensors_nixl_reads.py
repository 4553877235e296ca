"""The agent's bookkeeping, on a NIXL that only notes what is asked of it. With the real one: tests/integration."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from app.errors.tensors import PeerGone, TensorError
from app.messages.tensors import Descriptor
from app.tensors import nixl_agent, nixl_reads, sealed
from app.tensors.nixl_reads import Reads, Region


class Handle:
    def __init__(self, keys: dict[int, bytes], address: int) -> None:
        self.state, self.looks, self.key = "PROC", 0, keys[address]

    def release(self) -> None:
        pass


class Nixl:
    """Keeps the first key that it learns for an address, as NIXL does, until the peer is removed."""

    name = "own"

    def __init__(self) -> None:
        self.keys: dict[int, bytes] = {}
        self.handles: list[Handle] = []
        self.removed = 0

    def add_remote_agent(self, metadata: bytes) -> None:
        address, _, key = metadata.partition(b":")
        self.keys.setdefault(int(address), key)

    def remove_remote_agent(self, name: str) -> None:
        assert all(one.state != "PROC" for one in self.handles), "a transfer is in progress"
        self.keys.clear()
        self.removed += 1

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> int:
        return places[0][0]

    def initialize_xfer(self, kind: str, local: int, remote: int, *_: Any) -> Handle:
        self.handles.append(Handle(self.keys, remote))
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        return handle.state

    def check_xfer_state(self, handle: Handle) -> str:
        handle.looks += 1
        return handle.state

    def deregister_memory(self, *_: Any) -> None:
        pass


@pytest.fixture
def nixl() -> Nixl:
    return Nixl()


@pytest.fixture
def reads(nixl: Nixl) -> Reads:
    return Reads(nixl)


def source(address: int, key: str = "k") -> Descriptor:
    return Descriptor(
        agent="peer",
        host="h",
        path="/x",
        address=address,
        metadata=sealed.seal("peer", f"{address}:{key}".encode()),
        name="item",
        nonce="0" * 16,
        dtype="uint8",
        shape=[10],
        nbytes=10,
        expires_at=time.time() + 60,
    )


def begin(reads: Reads, of: Descriptor) -> tuple[Future[None], Region]:
    done, into = nixl_agent.promise(), Region(0, 10, None)
    reads.begin(of, 10, into, done)
    return done, into


def end(reads: Reads, *handles: Handle) -> None:
    for one in handles:
        one.state = "DONE"
    deadline = time.monotonic() + 5
    while any(read.handle in handles for read in reads._reads):
        assert time.monotonic() < deadline
        reads.poll()


def test_an_address_that_is_used_again_is_read_with_its_new_key(nixl: Nixl, reads: Reads) -> None:
    first, _ = begin(reads, source(1, "old"))
    again, _ = begin(reads, source(1, "new"))
    other, _ = begin(reads, source(2))
    assert len(nixl.handles) == 1, "the old connection is in use, and takes nothing new"
    end(reads, nixl.handles[0])
    assert first.done() and nixl.removed == 1
    assert [one.key for one in nixl.handles] == [b"old", b"new", b"k"]
    end(reads, *nixl.handles[1:])
    assert again.result(0) is None and other.result(0) is None
    assert nixl.removed == 1


def test_what_is_known_of_a_peer_is_bounded_under_steady_load(
    nixl: Nixl, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reads, "_MAX_KNOWN", 4)
    going: list[Handle] = []
    outcomes = []
    for address in range(50):
        outcomes.append(begin(reads, source(address))[0])
        going = [one for one in nixl.handles if one.state == "PROC"]
        if len(going) > 2:  # there is always one left
            end(reads, going[0])
        assert len(nixl.keys) <= 4
    while going := [one for one in nixl.handles if one.state == "PROC"]:
        end(reads, *going)
    assert all(one.result(0) is None for one in outcomes)
    assert nixl.removed >= 50 // 4 - 1


def test_who_left_while_waiting_is_not_written_to(nixl: Nixl, reads: Reads) -> None:
    begin(reads, source(1, "old"))
    left, into = begin(reads, source(1, "new"))
    gone: list[bool] = []
    reads.release(into, lambda: gone.append(True))
    assert gone == [True]
    end(reads, nixl.handles[0])
    assert len(nixl.handles) == 1
    with pytest.raises(PeerGone):
        left.result(0)


def test_closing_ends_those_that_wait(nixl: Nixl, reads: Reads) -> None:
    outcomes = [begin(reads, source(1, key))[0] for key in ("old", "new")]
    reads.close(TensorError("closed"))
    for one in outcomes:
        with pytest.raises(TensorError, match="closed"):
            one.result(0)


def test_the_longer_a_transfer_takes_the_less_it_is_looked_at(
    nixl: Nixl, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert reads.next_look_s is None
    begin(reads, source(1))
    old = nixl.handles[0]
    while now < 1020.0:
        assert reads.next_look_s is not None
        now += max(reads.next_look_s, 1e-6)
        reads.poll()
    assert old.looks < 400, "2000 a second would be 40000"
    assert reads.next_look_s == pytest.approx(0.1, abs=1e-3)
    # A young one is not kept waiting by it, nor does it make the old one be looked at more often.
    begin(reads, source(2))
    reads.poll()
    before = old.looks
    while nixl.handles[1].looks < 20:
        assert reads.next_look_s is not None and reads.next_look_s <= 0.0006
        now += max(reads.next_look_s, 1e-6)
        reads.poll()
    assert old.looks - before <= 1
