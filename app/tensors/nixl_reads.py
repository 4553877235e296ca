"""What a NIXL agent does: memory it registered, peers it knows, transfers that go on. All on the agent's thread.

Releasing a transfer that is going on does not keep the peer's bytes from arriving (seen with a stopped peer: they were
written after its release). So memory that a transfer writes to is given back only once NIXL says that the transfer is
over, however its reader left.

What cannot be helped here: over TCP, UCX ends a process that begins to answer a reader that is gone already (seen with
a holder stopped in between; not within a host, where the reader copies by itself, and not in the middle of an answer).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from app.errors.tensors import PeerGone, TensorError, TensorIncompatible, TensorMissing
from app.messages.tensors import Descriptor
from app.tensors import sealed

log = logging.getLogger(__name__)

BACKEND = "UCX"
# What is known of a peer grows with each buffer read; after so many the connection is made anew.
_MAX_KNOWN = 1024
# How often a transfer is looked at: from so many seconds on, a twentieth of its age, and at last ten times a second.
_POLL_S = 0.0005
_MAX_POLL_S = 0.1
_POLLS_PER_AGE = 20


@dataclass(eq=False)
class Region:
    """Memory that NIXL knows. `reads` counts the transfers that write to it; `then` runs once it may be reused."""

    address: int
    length: int
    descriptors: Any
    reads: int = 0
    then: Callable[[], None] | None = None


@dataclass(eq=False)
class _Peer:
    """Another agent. `known` is the metadata loaded for each of its ranges; `stale` asks for a new connection, which
    there is once the old one's `reads` are over. Until then new reads are `waiting`."""

    name: str
    known: dict[tuple[int, int], str] = field(default_factory=dict)
    reads: int = 0
    stale: bool = False
    waiting: list[_Wanted] = field(default_factory=list)


@dataclass(eq=False)
class _Wanted:
    """A read that is to begin."""

    source: Descriptor
    length: int
    into: Region
    done: Future[None]

    @property
    def given_up(self) -> bool:
        """The reader has left, and its memory may be gone."""
        return self.into.then is not None


@dataclass(eq=False)
class _Read:
    """A transfer. `fresh`: over a connection made for it. `due` is when to look at it (monotonic seconds)."""

    peer: _Peer
    into: Region
    done: Future[None]
    fresh: bool
    begun: float
    due: float = 0.0
    handle: Any = None


class Broken(PeerGone):
    """The connection failed. `fresh`: it was made for this very read, and another one would fail too."""

    def __init__(self, message: str, *, fresh: bool) -> None:
        super().__init__(message)
        self.fresh = fresh


class Reads:
    """The agent's state. `agent` is NIXL's, with its backend made."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._peers: dict[str, _Peer] = {}
        self._reads: list[_Read] = []
        self._waiting: set[Region] = set()

    @property
    def next_look_s(self) -> float | None:
        """Seconds until `poll` has something to do; None while no transfer goes on."""
        if not self._reads:
            return None
        return max(0.0, min(read.due for read in self._reads) - time.monotonic())

    def register(self, address: int, length: int) -> tuple[Region, str]:
        """Make memory readable for others; answers it and what they need to know (base64). Raises TensorError."""
        try:
            descriptors = self._agent.register_memory([(address, length, 0, "")], "DRAM", [BACKEND])
            metadata = self._agent.get_partial_agent_metadata(descriptors, True, [BACKEND])
        except Exception as error:
            raise TensorError(f"NIXL cannot register {length} bytes: {error}") from error
        return Region(address, length, descriptors), sealed.seal(self._agent.name, metadata)

    def release(self, region: Region, then: Callable[[], None]) -> None:
        """Deregister memory as soon as no transfer writes to it, then run `then`."""
        region.then = then
        if region.reads:
            self._waiting.add(region)
        else:
            self._deregister(region)
            _run(then)

    def begin(self, source: Descriptor, length: int, into: Region, done: Future[None]) -> None:
        """Start to read, as soon as the peer can be read from; `done` gets the outcome."""
        wanted = _Wanted(source, length, into, done)
        if (peer := self._to_wait_for(source)) is None:
            self._begin(wanted)
        else:
            peer.waiting = [one for one in peer.waiting if not one.given_up] + [wanted]

    def _begin(self, wanted: _Wanted) -> None:
        source, length, into, done = wanted.source, wanted.length, wanted.into, wanted.done
        try:
            peer, fresh = self._meet(source)
        except TensorError as error:
            done.set_exception(error)
            return
        read = _Read(peer, into, done, fresh, time.monotonic())
        peer.reads += 1
        into.reads += 1
        self._reads.append(read)
        try:
            local = self._agent.get_xfer_descs([(into.address, length, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(source.address, length, 0)], "DRAM")
            read.handle = self._agent.initialize_xfer("READ", local, remote, peer.name, b"", [BACKEND])
            self._advance(read, self._agent.transfer(read.handle))
        except Exception as error:
            self._finish(read, _explain(error, read))

    def poll(self) -> None:
        """Look how the transfers go: at each the less often the longer it takes."""
        now = time.monotonic()
        for read in list(self._reads):
            if read.due > now:
                continue
            read.due = now + min(_MAX_POLL_S, max(_POLL_S, (now - read.begun) / _POLLS_PER_AGE))
            try:
                self._advance(read, self._agent.check_xfer_state(read.handle))
            except Exception as error:
                self._finish(read, _explain(error, read))

    def distrust(self, name: str) -> None:
        """A peer kept silent: connect anew as soon as nothing is left of the old connection."""
        if peer := self._peers.get(name):
            peer.stale = True
            self._forget_if_stale(peer)

    def close(self, error: TensorError) -> None:
        """Destroy the agent, and only then end the transfers: until then they may write."""
        unfinished, self._reads = self._reads, []
        ends = [read.done for read in unfinished]
        ends += [one.done for peer in self._peers.values() for one in peer.waiting]
        for read in unfinished:
            self._let_go(read)
        self._peers.clear()
        self._agent = None
        for region in self._waiting:
            _run(region.then)
        for done in ends:
            done.set_exception(error)

    def _to_wait_for(self, source: Descriptor) -> _Peer | None:
        """The peer, if its old connection is still in use and not good for this read."""
        peer = self._peers.get(source.agent)
        if peer is None:
            return None
        place = (source.address, source.nbytes)
        # NIXL keeps the first key that it learned for a range.
        if peer.known.get(place, source.metadata) != source.metadata:
            peer.stale = True
        if place not in peer.known and len(peer.known) >= _MAX_KNOWN:
            peer.stale = True
        return peer if peer.stale and not self._forget_if_stale(peer) else None

    def _meet(self, source: Descriptor) -> tuple[_Peer, bool]:
        """The peer, with what is needed to read this buffer loaded, and whether the connection is new."""
        place = (source.address, source.nbytes)
        peer = self._peers.get(source.agent)
        if peer is not None and peer.known.get(place) == source.metadata:
            return peer, False
        try:
            self._load(source)
        except TensorError:
            self.distrust(source.agent)
            raise
        met = peer or self._peers.setdefault(source.agent, _Peer(source.agent))
        met.known[place] = source.metadata
        return met, peer is None

    def _load(self, source: Descriptor) -> None:
        metadata = sealed.unseal(source)
        try:
            self._agent.add_remote_agent(metadata)
        except Exception as error:
            if "BACKEND" in str(error):
                raise Broken(f"{source.agent} cannot be reached ({error})", fresh=True) from None
            raise TensorIncompatible(f"{source.name}: NIXL does not take the descriptor's metadata ({error})") from None

    def _advance(self, read: _Read, state: str) -> None:
        if state == "DONE":
            self._finish(read, None)
        elif state != "PROC":
            self._finish(read, _explain(RuntimeError(state), read))

    def _finish(self, read: _Read, error: TensorError | None) -> None:
        self._reads.remove(read)
        self._let_go(read)
        read.peer.reads -= 1
        read.into.reads -= 1
        if read.into.reads == 0 and read.into in self._waiting:
            self._waiting.discard(read.into)
            self._deregister(read.into)
            _run(read.into.then)
        if error is None:
            read.done.set_result(None)
        else:
            read.done.set_exception(error)
        self._forget_if_stale(read.peer)

    def _let_go(self, read: _Read) -> None:
        try:
            if read.handle is not None:
                read.handle.release()
        except Exception as failure:
            log.warning("NIXL keeps a transfer from %s: %s", read.peer.name, failure)
        # It refers to NIXL's agent, which must not outlive `close`.
        read.handle = None

    def _forget_if_stale(self, peer: _Peer) -> bool:
        if not peer.stale or peer.reads or self._peers.get(peer.name) is not peer:
            return False
        del self._peers[peer.name]
        try:
            self._agent.remove_remote_agent(peer.name)
        except Exception as error:
            log.debug("NIXL had forgotten %s: %s", peer.name, error)
        waiting, peer.waiting = peer.waiting, []
        for wanted in waiting:
            if wanted.given_up:
                wanted.done.set_exception(PeerGone(f"{peer.name} was busy for too long"))
            else:
                self.begin(wanted.source, wanted.length, wanted.into, wanted.done)
        return True

    def _deregister(self, region: Region) -> None:
        try:
            self._agent.deregister_memory(region.descriptors, [BACKEND])
        except Exception as error:
            log.warning("NIXL keeps %d bytes registered: %s", region.length, error)


def _explain(error: Exception, read: _Read) -> TensorError:
    read.peer.stale = True
    if "NOT_FOUND" in str(error):
        return TensorMissing(f"{read.peer.name} has no such buffer ({error})")
    return Broken(f"{read.peer.name} is gone ({error})", fresh=read.fresh)


def _run(job: Callable[[], None] | None) -> None:
    try:
        if job is not None:
            job()
    except Exception:
        log.exception("giving memory back failed")
