"""Media bytes of the requests in flight, in shared memory, where any process of the cluster can read them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from app.errors import MediaMemoryFull, TensorError
from app.messages import Descriptor
from app.tensors import segment
from app.tensors.segment import Header

log = logging.getLogger(__name__)


#: A lease is made so much longer, so that a medium that many requests have is not published anew for each.
SPARE_S = 60.0
#: Longest wait of `MediaHolder.close` for media that are being withdrawn.
CLOSE_S = 3.0


class Plane(Protocol):
    """What is needed of the tensor plane."""

    async def publish(self, path: Path, lease_s: float) -> Descriptor: ...

    async def withdraw(self, path: Path) -> None: ...


@dataclass
class _Held:
    """One medium. `users` are requests that may read it, `until` (unix seconds) is when the last of them is over.

    `ready` writes it, `source` is how it was published last, `lock` is for whoever changes that. `offered` is true
    from the first attempt to publish it on, `gone` once it is to be taken away.
    """

    path: Path
    size: int
    until: float
    users: int = 0
    ready: asyncio.Task[None] = field(init=False)
    source: Descriptor | None = None
    offered: bool = False
    gone: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class MediaHolder:
    """Keeps each medium once, however many requests have it, until all of them released it or their leases are over.

    A medium takes its size and a page of memory in `directory`, which is the holder's alone. Used on one event loop;
    files are written and removed in threads.
    """

    def __init__(self, plane: Plane, directory: Path, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.size = 0
        """Bytes in use, of media that are on their way in or out too."""
        self._plane = plane
        self._directory = directory
        self._held: dict[str, _Held] = {}
        self._numbers = count()
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    async def put(self, identity: str, data: bytes, lease_s: float) -> Descriptor:
        """Hold the medium for one more request, for at most `lease_s` seconds; where its bytes lie.

        Raises MediaMemoryFull, or a TensorError when it cannot be published; then nothing more is held than before.
        """
        if self._closed:
            raise MediaMemoryFull("the server is stopping; try again")
        self._sweep()
        until = time.time() + lease_s
        held = self._held.get(identity) or self._begin(identity, data)
        held.users, held.until = held.users + 1, max(held.until, until)
        try:
            await asyncio.shield(held.ready)
            return await self._published(held, until)
        except BaseException:
            self._let_go(identity, held)
            raise

    async def release(self, identity: str) -> None:
        """One request less needs it. A medium that is not held any more, since its lease was over, is nothing wrong."""
        held = self._held.get(identity)
        if held is not None and (leaving := self._let_go(identity, held)) is not None:
            await asyncio.shield(leaving)

    async def close(self) -> None:
        """Take everything away, whoever may need it. No file is left, unless the plane does not answer."""
        self._closed = True
        for identity, held in [*self._held.items()]:
            self._remove(identity, held)
        end = time.monotonic() + CLOSE_S
        while self._leaving and (left := end - time.monotonic()) > 0:
            await asyncio.wait(self._leaving, timeout=left)
        if self._leaving:
            log.error("%d media are not withdrawn after %g s", len(self._leaving), CLOSE_S)

    def _begin(self, identity: str, data: bytes) -> _Held:
        size = len(data) + segment.PAGE
        if self.size + size > self.capacity:
            raise MediaMemoryFull(
                f"the media of the requests in flight fill the server's memory for them ({self.capacity / 1e9:g} GB, "
                "tensors.media_gb); try again"
            )
        # The number keeps a medium that comes again apart from the file of the one that is being removed.
        path = self._directory / segment.file_name(f"{identity} {next(self._numbers)}")
        held = self._held[identity] = _Held(path, size, until=0.0)
        self.size += size
        held.ready = asyncio.create_task(self._write(identity, held, data))
        held.ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # all who waited may have left
        return held

    async def _write(self, identity: str, held: _Held, data: bytes) -> None:
        header = Header(identity, segment.new_nonce(), "uint8", (len(data),), len(data))
        try:
            await asyncio.to_thread(segment.fill, held.path, header, data)
        except OSError as error:
            self._remove(identity, held)
            log.error("media cannot be written to %s: %s", self._directory, error)
            raise MediaMemoryFull("the server's shared memory is full; try again") from error

    async def _published(self, held: _Held, until: float) -> Descriptor:
        """A descriptor that is good until then."""
        async with held.lock:
            if held.gone:
                raise MediaMemoryFull("the server took the medium away while it came in; try again")
            if held.source is None or held.source.expires_at < until:
                held.offered = True
                try:
                    held.source = await self._plane.publish(held.path, until - time.time() + SPARE_S)
                except TensorError as error:
                    log.error("the medium in %s cannot be published: %s", held.path, error)
                    raise
            return held.source

    def _let_go(self, identity: str, held: _Held) -> asyncio.Task[None] | None:
        held.users -= 1
        return self._remove(identity, held) if held.users <= 0 else None

    def _sweep(self) -> None:
        """Drop what requests should have released, and did not."""
        now = time.time()
        for identity, held in [*self._held.items()]:
            if held.until < now:
                log.warning("medium %s was not released before its lease was over (%d users)", identity, held.users)
                self._remove(identity, held)

    def _remove(self, identity: str, held: _Held) -> asyncio.Task[None] | None:
        if self._held.get(identity) is not held:
            return None  # on its way out already
        del self._held[identity]
        held.gone = True
        leaving = asyncio.create_task(self._take_away(held))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return leaving

    async def _take_away(self, held: _Held) -> None:
        await asyncio.wait({held.ready})
        try:
            async with held.lock:
                if held.offered:
                    await self._plane.withdraw(held.path)
        except Exception:
            log.exception("the medium in %s could not be withdrawn", held.path)
        finally:
            await asyncio.to_thread(held.path.unlink, missing_ok=True)
            self.size -= held.size
