"""The tensor plane: publish a buffer and get a descriptor; fetch a descriptor into a local file.

On one host the holder's file gets a second name, which costs nothing and keeps it alive for as long as anybody wants;
between hosts, or when the settings say so, NIXL reads it. The checks are the same.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from app.errors.tensors import TensorError, TensorExpired, TensorIncompatible, TensorMissing, TensorTooLarge
from app.messages.tensors import Descriptor
from app.settings_sections import TensorSettings
from app.tensors import local, segment
from app.tensors.buffers import Buffers, Opening, Served
from app.tensors.nixl_agent import NixlAgent
from app.tensors.segment import Header
from app.threads import unbroken

log = logging.getLogger(__name__)
T = TypeVar("T")
Way = Literal["mapped", "copied", "nixl"]

_QUARANTINE_S = 60.0
_CLOSE_S = 10.0


@dataclass
class Counts:
    """What a plane has done since its start. `mapped`, `copied` and `nixl` count the buffers got from others, by the
    way they came: the holder's own file, a copy of it, NIXL. `failures` has those that did not come, by error code."""

    mapped: int = 0
    copied: int = 0
    nixl: int = 0
    mapped_bytes: int = 0
    copied_bytes: int = 0
    nixl_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def add(self, way: Way, nbytes: int) -> None:
        setattr(self, way, getattr(self, way) + 1)
        setattr(self, f"{way}_bytes", getattr(self, f"{way}_bytes") + nbytes)


class TensorPlane:
    """This process's part in moving buffers. All methods belong to the event loop that `start` ran in.

    `directory` is the process's own folder, below `settings.directory`. What goes wrong is a TensorError:
    TensorExpired, TensorMissing, TensorIncompatible, TensorTooLarge, PeerGone, or the plain class when memory is short
    or the plane is closed.
    """

    def __init__(self, directory: Path, settings: TensorSettings, progress_delay_us: int) -> None:
        self.directory = directory
        self.counts = Counts()
        self.host = local.host_of(directory)
        self._root = Path(settings.directory)
        self._settings = settings
        self._agent = NixlAgent(settings.host, progress_delay_us, settings.timeout_s)
        self._buffers = Buffers(self._agent, max(_QUARANTINE_S, 3 * settings.timeout_s))
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def start(self) -> None:
        """Make the NIXL agent: a second or two."""
        await self._agent.start()

    async def close(self) -> None:
        """Withdraw everything. Fetches in progress end with TensorError. The published files stay their owners'."""
        self._closed = True
        try:
            await self._agent.close()
        except TensorError as error:
            log.error("%s: its memory stays mapped", error)
            return
        # What goes on ends with the agent, or copies within this host.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _CLOSE_S)
        self._buffers.close()

    async def publish(self, path: Path, lease_s: float) -> Descriptor:
        """Let others read the buffer in this file for `lease_s` seconds; again for one that is published already.

        It is mapped and registered at the first call, and stays so until `withdraw`, which is due when the file is
        deleted.
        """
        path = _absolute(path)
        async with self._work(path.name):
            served = self._buffers.find(path) or await self._open(path)
            expires_at = time.time() + lease_s
            served.expires_at = max(served.expires_at, expires_at)
        return Descriptor(
            agent=self._agent.name,
            host=self.host,
            path=str(path),
            address=served.mapping.address,
            metadata=served.metadata,
            name=served.header.name,
            nonce=served.header.nonce,
            dtype=served.header.dtype,
            shape=list(served.header.shape),
            nbytes=served.header.nbytes,
            expires_at=expires_at,
        )

    async def withdraw(self, path: Path) -> None:
        """Stop serving this file: readers get TensorMissing. Nothing happens for one that is not served.

        Its memory is free once the caller has deleted the file. Its addresses stay readable, as zeros, until nobody can
        have a valid descriptor of it.
        """
        self._buffers.unmap_due()
        await self._buffers.withdraw(_absolute(path))

    async def fetch(self, descriptor: Descriptor, destination: Path) -> Header:
        """Bring a buffer into a local file, which is whole as soon as it can be seen; one that is there is replaced.

        Who deletes the file calls `withdraw` too.
        """
        destination = _absolute(destination)
        part = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}")
        async with self._work(descriptor.name, part):
            promised = self._admit(descriptor)
            way: Way | None = await self._nearby(descriptor, lambda: local.link(descriptor, promised, self._root, part))
            if way is None:
                await self._pull(descriptor, promised, part, destination)
            else:
                self._name(part, destination)
            self.counts.add(way or "nixl", promised.nbytes)
            return promised

    async def read(self, descriptor: Descriptor) -> bytes:
        """The payload of a buffer, with no file left."""
        part = self.directory / f".{secrets.token_hex(8)}"
        async with self._work(descriptor.name, part):
            promised = self._admit(descriptor)
            data = await self._nearby(descriptor, lambda: local.payload(descriptor, promised, self._root))
            way: Way = "mapped" if data is not None else "nixl"
            if data is None:
                opening = self._buffers.opening()
                try:
                    await self._transfer(descriptor, promised, part, opening)
                    data = await unbroken(lambda: bytes(segment.read_payload(part, promised)))
                finally:
                    opening.undo()
            self.counts.add(way, promised.nbytes)
            return data

    def _admit(self, descriptor: Descriptor) -> Header:
        """Refuse what can be refused before anything is done."""
        if descriptor.expires_at <= time.time():
            raise TensorExpired(f"{descriptor.name}: the lease that {descriptor.agent} gave is over")
        self._check_size(descriptor.name, descriptor.nbytes)
        return local.described(descriptor)

    def _check_size(self, name: str, nbytes: int) -> None:
        limit = self._settings.max_buffer_mb
        if nbytes > limit * 1e6:
            raise TensorTooLarge(f"{name} has {nbytes / 1e6:.6g} MB; tensors.max_buffer_mb allows {limit:g}")

    async def _nearby(self, descriptor: Descriptor, job: Callable[[], T | None]) -> T | None:
        """What the job gets from the holder's file; None when NIXL has to read it."""
        own = descriptor.agent == self._agent.name
        if not own and (self._settings.transport == "nixl" or descriptor.host != self.host):
            return None
        found = await unbroken(job)
        if found is None and own:
            raise TensorMissing(f"{descriptor.name}: its holder took it away")
        return found

    async def _open(self, path: Path) -> Served:
        opening = self._buffers.opening()
        try:
            served = await opening.open(path)
            self._check_size(served.header.name, served.header.nbytes)
            if served.header.nbytes == 0:
                raise TensorIncompatible(f"{served.header.name}: nothing in it to publish")
            meanwhile = self._buffers.find(path)
        except BaseException:
            opening.undo()
            raise
        if meanwhile is not None:
            opening.undo()
            return meanwhile
        self._buffers.serve(path, served)
        return served

    async def _pull(self, descriptor: Descriptor, promised: Header, part: Path, destination: Path) -> None:
        opening = self._buffers.opening()
        try:
            served = await self._transfer(descriptor, promised, part, opening)
            # Nothing is awaited from here to the caller's return: a cancelled fetch leaves nothing.
            self._name(part, destination)
        except BaseException:
            opening.undo()
            raise
        self._buffers.serve(destination, served)

    async def _transfer(self, descriptor: Descriptor, promised: Header, part: Path, opening: Opening) -> Served:
        """Read a buffer by NIXL into a new file."""
        end = time.monotonic() + self._settings.timeout_s
        await unbroken(lambda: segment.allocate(part, promised.total))
        served = await opening.open(part, promised)
        # The header once more after all: it is gone if the holder withdrew the buffer in the meantime.
        for length in (promised.total, segment.PAGE):
            await self._agent.read(descriptor, length, served.region, max(0.0, end - time.monotonic()))
            _check_arrived(part, promised)
        return served

    def _name(self, part: Path, destination: Path) -> None:
        if self._closed:
            raise TensorError("the tensor plane is closed")
        part.rename(destination)

    @asynccontextmanager
    async def _work(self, name: str, part: Path | None = None) -> AsyncIterator[None]:
        """What publish, fetch and read have around them: no `part` is left, and errors have names and are counted."""
        self._buffers.unmap_due()
        self._working += 1
        self._idle.clear()
        try:
            if self._closed:
                raise TensorError("the tensor plane is closed")
            try:
                yield
            except OSError as error:
                raise self._named(error, name) from error
        except TensorError as error:
            self.counts.failures[error.code] = self.counts.failures.get(error.code, 0) + 1
            raise
        finally:
            if part is not None:
                _remove(part)
            self._working -= 1
            if not self._working:
                self._idle.set()

    def _named(self, error: OSError, name: str) -> TensorError:
        if isinstance(error, FileNotFoundError):
            return TensorMissing(f"{name}: {error.filename} does not exist")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return TensorError(f"{name}: no room left in {self._root} (tensors.directory)")
        return TensorError(f"{name}: {error}")


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _remove(part: Path) -> None:
    # It may be there even after its rename, which does nothing where both names were one file's already.
    with suppress(OSError):
        part.unlink()


def _check_arrived(part: Path, promised: Header) -> None:
    with segment.opened(part) as file:
        page = os.pread(file, segment.PAGE, 0)
    if not page.startswith(segment.MAGIC):
        raise TensorMissing(f"{promised.name}: its holder took it away")
    local.agree(segment.decode(page), promised)
