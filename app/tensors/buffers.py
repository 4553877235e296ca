"""Files of this process that its NIXL agent knows: mapped once, registered once, and unmapped when nobody can ask.

Over TCP a peer may read an address long after the memory was deregistered, and the process that had unmapped it would
die of the access. So withdrawn memory stays readable, as zeros, until its last descriptor is out of date.
"""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from app.tensors import segment
from app.tensors.mapping import Mapping
from app.tensors.nixl_agent import NixlAgent, promise
from app.tensors.nixl_reads import Reads, Region
from app.tensors.segment import Header


@dataclass(eq=False)
class Served:
    """A buffer that others may read. `inode` tells its file from another one that has the name by now; `expires_at`
    (unix seconds) is that of its last descriptor, 0 before the first."""

    header: Header
    inode: tuple[int, int]
    mapping: Mapping
    region: Region
    metadata: str
    expires_at: float = 0.0


class Opening:
    """A buffer that is being made on the agent's thread, and can be undone whether it was finished or not."""

    def __init__(self, agent: NixlAgent, mappings: set[Mapping]) -> None:
        self._agent = agent
        self._mappings = mappings
        self._mapping: Mapping | None = None
        self._region: Region | None = None

    async def open(self, path: Path, header: Header | None = None) -> Served:
        """Map and register a file: one with a buffer in it, or one that gets the buffer with this header."""
        return await self._agent.call(lambda reads: self._open(reads, path, header))

    def undo(self) -> None:
        """Unmap it as soon as no transfer writes to it; does not wait. Nobody else may know its address."""
        self._agent.submit(self._undo, lambda: None)

    def _open(self, reads: Reads, path: Path, header: Header | None) -> Served:
        with segment.opened(path, os.O_RDWR) as file:
            status = os.fstat(file)
            header = header or segment.header_of(file)
            # Some networks' drivers register only memory that may be written to.
            self._mapping = mapping = Mapping(file, writable=True)
        self._mappings.add(mapping)
        self._region, metadata = reads.register(mapping.address, mapping.length)
        return Served(header, (status.st_dev, status.st_ino), mapping, self._region, metadata)

    def _undo(self, reads: Reads) -> None:
        if self._region is not None:
            reads.release(self._region, self._unmap)
        else:
            self._unmap()

    def _unmap(self) -> None:
        if self._mapping is not None:
            self._mapping.unmap()
            self._mappings.discard(self._mapping)


class Buffers:
    """What this process serves, by absolute path. All but what `Opening` does happens in the event loop.

    Withdrawn addresses are unmapped `quarantine_s` after nobody may use a descriptor of them any more.
    """

    def __init__(self, agent: NixlAgent, quarantine_s: float) -> None:
        self._agent = agent
        self._quarantine_s = quarantine_s
        self._served: dict[Path, Served] = {}
        self._withdrawn: list[tuple[float, int, Mapping]] = []
        self._numbers = itertools.count()
        self._mappings: set[Mapping] = set()

    def opening(self) -> Opening:
        return Opening(self._agent, self._mappings)

    def find(self, path: Path) -> Served | None:
        """What is served under this path, if that is still the file that has it. FileNotFoundError without a file."""
        status = os.stat(path, follow_symlinks=False)
        served = self._served.get(path)
        return served if served is not None and served.inode == (status.st_dev, status.st_ino) else None

    def serve(self, path: Path, served: Served) -> None:
        """Serve a buffer in place of what was served there."""
        before = self._served.get(path)
        self._served[path] = served
        if before is not None:
            self._take_away(before, lambda: None)

    async def withdraw(self, path: Path) -> None:
        """Put zeros in a buffer's place. It happens even when the caller is cancelled meanwhile, or gets a TensorError
        since NIXL is late."""
        served = self._served.pop(path, None)
        if served is not None:
            done = promise()
            self._take_away(served, lambda: _settle(done))
            await self._agent.wait(done)

    def unmap_due(self) -> None:
        """Give back the addresses whose quarantine is over."""
        now = time.monotonic()
        while self._withdrawn and self._withdrawn[0][0] <= now:
            _, _, mapping = heapq.heappop(self._withdrawn)
            if not mapping.withdrawn:
                # The agent is late: NIXL still has the memory.
                self._quarantine(mapping, now)
                continue
            mapping.unmap()
            self._mappings.discard(mapping)

    def close(self) -> None:
        """Unmap everything. Only once the agent is destroyed: before, it or a peer might still use the memory."""
        for mapping in self._mappings:
            mapping.unmap()
        self._mappings.clear()
        self._served.clear()
        self._withdrawn.clear()

    def _take_away(self, served: Served, done: Callable[[], None]) -> None:
        mapping, region = served.mapping, served.region

        def zero() -> None:
            try:
                mapping.withdraw()
            finally:
                done()

        self._quarantine(mapping, time.monotonic() + max(0.0, served.expires_at - time.time()))
        self._agent.submit(lambda reads: reads.release(region, zero), done)

    def _quarantine(self, mapping: Mapping, begin: float) -> None:
        heapq.heappush(self._withdrawn, (begin + self._quarantine_s, next(self._numbers), mapping))


def _settle(done: Future[None]) -> None:
    if not done.done():
        done.set_result(None)
