"""Media bytes in shared memory, where any process of the cluster can read them: of requests in flight, and kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from app.errors.media import MediaMemoryFull
from app.errors.tensors import TensorError
from app.messages.tensors import Descriptor
from app.tensors import segment
from app.tensors.segment import Header

log = logging.getLogger(__name__)


#: A lease is made so much longer, so that a medium that many requests have is not published anew for each.
SPARE_S = 60.0
#: How long one that no request has may be read, counted from its last renewal, and how often that is looked after.
KEPT_S = 600.0
RENEW_S = 60.0
#: Most media: each takes mappings, of which a process may have 65530.
MOST = 8192
#: Longest wait of `MediaHolder.close` for media that are being withdrawn.
CLOSE_S = 3.0


class Plane(Protocol):
    """What is needed of the tensor plane."""

    async def publish(self, path: Path, lease_s: float) -> Descriptor: ...

    async def withdraw(self, path: Path) -> None: ...


class Places(Protocol):
    """Who is told of what can be read here. Neither waits."""

    def add(self, identity: str, source: Descriptor) -> None: ...

    def remove(self, identity: str) -> None: ...


@dataclass
class _Held:
    """One medium. `users` are requests that may read it, `until` (unix seconds) is when the last of them is over.

    `ready` writes it, `source` is how it was published last, `lock` is for whoever changes that. `offered` is true
    from the first attempt to publish it on, `gone` once it is to be taken away.
    """

    identity: str
    path: Path
    size: int
    until: float = 0.0
    users: int = 0
    ready: asyncio.Task[None] = field(init=False)
    source: Descriptor | None = None
    offered: bool = False
    gone: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class MediaHolder:
    """Keeps each medium once, however many requests have it, and after them until its room is needed.

    A medium takes its size and a page of memory in `directory`, which is the holder's alone. Used on one event loop;
    files are written and removed in threads. `places` are told where others can read what is here.
    """

    def __init__(self, plane: Plane, directory: Path, capacity_bytes: int, places: Places | None = None) -> None:
        self.capacity = capacity_bytes
        self.size = 0
        """Bytes in use, of media that are on their way in or out too."""
        self._plane = plane
        self._directory = directory
        self._places = places
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._in_use = 0
        self._numbers = count()
        self._leaving: dict[asyncio.Task[None], int] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def users(self) -> int:
        """Holds of requests, each of which has to be released."""
        return sum(held.users for held in self._held.values())

    async def put(self, identity: str, data: bytes, lease_s: float) -> Descriptor:
        """Hold the medium for one more request, for at most `lease_s` seconds; where its bytes lie.

        Raises MediaMemoryFull, or a TensorError when it cannot be published; then nothing more is held than before.
        """
        held = self._held.get(identity) or await self._begin(identity, data)
        return await self._use(held, lease_s)

    async def take(self, identity: str, lease_s: float) -> Descriptor | None:
        """The same for a medium that is here; None for any other. Raises as `put` does."""
        held = self._held.get(identity)
        return None if held is None else await self._use(held, lease_s)

    def release(self, identity: str) -> None:
        """One request less needs it. A medium that is not held any more, since its lease was over, is nothing wrong."""
        held = self._held.get(identity)
        if held is not None and held.users:
            self._let_go(held)

    async def keep_offered(self) -> None:
        """For ever: renew the leases of media that requests may come back to."""
        while True:
            await asyncio.sleep(RENEW_S)
            for held in [*self._held.values()]:
                if held.source is not None and held.source.expires_at < time.time() + KEPT_S / 2:
                    try:
                        await self._published(held, time.time() + KEPT_S)
                    except (TensorError, MediaMemoryFull) as error:
                        log.warning("medium %s is not offered to others any more: %s", held.identity, error.code)

    async def close(self) -> None:
        """Take everything away, whoever may need it. No file is left, unless the plane does not answer."""
        self._closed = True
        for held in [*self._held.values()]:
            self._remove(held)
        end = time.monotonic() + CLOSE_S
        while self._leaving and (left := end - time.monotonic()) > 0:
            await asyncio.wait(self._leaving, timeout=left)
        if self._leaving:
            log.error("%d media are not withdrawn after %g s", len(self._leaving), CLOSE_S)

    async def _use(self, held: _Held, lease_s: float) -> Descriptor:
        until = time.time() + lease_s
        self._in_use += 0 if held.users else held.size
        held.users, held.until = held.users + 1, max(held.until, until)
        if not held.gone:
            self._held.move_to_end(held.identity)
        try:
            await asyncio.shield(held.ready)
            return await self._published(held, until)
        except BaseException:
            self._let_go(held)
            if not held.users and held.source is None:
                self._remove(held)
            raise

    async def _begin(self, identity: str, data: bytes) -> _Held:
        size = len(data) + segment.PAGE
        await self._make_room(size)
        if (other := self._held.get(identity)) is not None:
            return other  # that came while room was made
        # The number keeps a medium that comes again apart from the file of the one that is being removed.
        path = self._directory / segment.file_name(f"{identity} {next(self._numbers)}")
        held = self._held[identity] = _Held(identity, path, size)
        self.size += size
        held.ready = asyncio.create_task(self._write(held, data))
        held.ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # all who waited may have left
        return held

    async def _make_room(self, size: int) -> None:
        """Return when `size` bytes can be taken at once. What no request has goes, the least recently used first."""
        while True:
            if self._closed:
                raise MediaMemoryFull("the server is stopping; try again")
            if self.size + size <= self.capacity and len(self._held) < MOST:
                return
            staying = self.size - sum(self._leaving.values())
            if staying + size > self.capacity or len(self._held) >= MOST:
                self._evict(size)
            else:
                await asyncio.wait(self._leaving, return_when=asyncio.FIRST_COMPLETED)

    def _evict(self, size: int) -> None:
        if self._in_use + size > self.capacity:
            self._sweep()
        idle = next((held for held in self._held.values() if not held.users and held.ready.done()), None)
        if idle is None or self._in_use + size > self.capacity:
            raise MediaMemoryFull(
                f"the media of the requests in flight fill the server's memory for them ({self.capacity / 1e9:g} GB, "
                "tensors.media_gb); try again"
            )
        self._remove(idle)

    async def _write(self, held: _Held, data: bytes) -> None:
        header = Header(held.identity, segment.new_nonce(), "uint8", (len(data),), len(data))
        try:
            await asyncio.to_thread(segment.fill, held.path, header, data)
        except OSError as error:
            self._remove(held)
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
                if self._places is not None and not held.gone:
                    self._places.add(held.identity, held.source)
            return held.source

    def _sweep(self) -> None:
        """Let go of what requests should have released, and did not."""
        now = time.time()
        for held in self._held.values():
            if held.users and held.until < now:
                log.warning(
                    "medium %s was not released before its lease was over (%d users)", held.identity, held.users
                )
                while held.users:
                    self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        held.users -= 1
        self._in_use -= 0 if held.users else held.size

    def _remove(self, held: _Held) -> None:
        if held.gone:
            return  # on its way out already
        del self._held[held.identity]
        held.gone = True
        if self._places is not None and held.offered:
            self._places.remove(held.identity)
        leaving = asyncio.create_task(self._take_away(held))
        self._leaving[leaving] = held.size
        leaving.add_done_callback(self._leaving.pop)

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
