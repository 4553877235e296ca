"""What a NIXL agent does: memory it registered, peers it knows, transfers that go on. All on the agent's thread.

Releasing a transfer that is going on does not keep the peer's bytes from arriving (seen with a stopped peer: they were
written after its release). So memory that a transfer writes to is given back only once NIXL says that the transfer is
over, however its reader left.

What cannot be helped here: over TCP, UCX ends a process that begins to answer a reader that is gone already (seen with
a holder stopped in between; not within a host, where the reader copies by itself, and not in the middle of an answer).
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import blake3

from app.errors import PeerGone, TensorError, TensorIncompatible, TensorMissing
from app.messages import Descriptor

log = logging.getLogger(__name__)

BACKEND = "UCX"
_DIGEST = 16
# What is known of a peer grows with each buffer read; after so many the connection is made anew.
_MAX_KNOWN = 1024


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
    """Another agent. `known` is the metadata loaded for each of its ranges; `stale` asks for a new connection."""

    name: str
    known: dict[tuple[int, int], str] = field(default_factory=dict)
    reads: int = 0
    stale: bool = False


@dataclass(eq=False)
class _Read:
    """A transfer. `fresh`: over a connection made for it."""

    peer: _Peer
    into: Region
    done: Future[None]
    fresh: bool
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
    def going_on(self) -> bool:
        return bool(self._reads)

    def register(self, address: int, length: int) -> tuple[Region, str]:
        """Make memory readable for others; answers it and what they need to know (base64). Raises TensorError."""
        try:
            descriptors = self._agent.register_memory([(address, length, 0, "")], "DRAM", [BACKEND])
            metadata = self._agent.get_partial_agent_metadata(descriptors, True, [BACKEND])
        except Exception as error:
            raise TensorError(f"NIXL cannot register {length} bytes: {error}") from error
        return Region(address, length, descriptors), _seal(self._agent.name, metadata)

    def release(self, region: Region, then: Callable[[], None]) -> None:
        """Deregister memory as soon as no transfer writes to it, then run `then`."""
        region.then = then
        if region.reads:
            self._waiting.add(region)
        else:
            self._deregister(region)
            _run(then)

    def begin(self, source: Descriptor, length: int, into: Region, done: Future[None]) -> None:
        """Start to read; `done` gets the outcome."""
        try:
            peer, fresh = self._meet(source)
        except TensorError as error:
            done.set_exception(error)
            return
        read = _Read(peer, into, done, fresh)
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
        """Look how the transfers go."""
        for read in list(self._reads):
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
        for read in unfinished:
            self._let_go(read)
        self._peers.clear()
        self._agent = None
        for region in self._waiting:
            _run(region.then)
        for read in unfinished:
            read.done.set_exception(error)

    def _meet(self, source: Descriptor) -> tuple[_Peer, bool]:
        """The peer, with what is needed to read this buffer loaded, and whether the connection is new."""
        place = (source.address, source.nbytes)
        peer = self._peers.get(source.agent)
        if peer is not None:
            # NIXL keeps the first key that it learned for a range.
            if peer.known.get(place, source.metadata) != source.metadata or len(peer.known) >= _MAX_KNOWN:
                peer.stale = True
            if self._forget_if_stale(peer):
                peer = None
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
        metadata = _unseal(source)
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
        self._forget_if_stale(read.peer)
        if read.into.reads == 0 and read.into in self._waiting:
            self._waiting.discard(read.into)
            self._deregister(read.into)
            _run(read.into.then)
        if error is None:
            read.done.set_result(None)
        else:
            read.done.set_exception(error)

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
        return True

    def _deregister(self, region: Region) -> None:
        try:
            self._agent.deregister_memory(region.descriptors, [BACKEND])
        except Exception as error:
            log.warning("NIXL keeps %d bytes registered: %s", region.length, error)


def _seal(agent: str, metadata: bytes) -> str:
    """With a digest: after metadata that are cut short NIXL can never again be connected to their agent."""
    return base64.b64encode(_digest(agent, metadata) + metadata).decode()


def _unseal(source: Descriptor) -> bytes:
    try:
        sealed = base64.b64decode(source.metadata, validate=True)
    except binascii.Error:
        sealed = b""
    digest, metadata = sealed[:_DIGEST], sealed[_DIGEST:]
    if not metadata or digest != _digest(source.agent, metadata):
        raise TensorIncompatible(f"{source.name}: the descriptor's metadata is broken, or not of {source.agent}")
    return metadata


def _digest(agent: str, metadata: bytes) -> bytes:
    return blake3.blake3(agent.encode() + b"\0" + metadata).digest(length=_DIGEST)


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
