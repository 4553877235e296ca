"""Room in the embedding store for those who can wait for it.

Nobody waits for more room while holding some: all that a prompt needs is granted at once, or nothing. Otherwise two
prompts could each hold what the other one waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from workers.embeddings.store import EmbeddingStore

#: How long an item that was encoded for others is kept for them, when there is no room for the next.
UNTAKEN_S = 10.0
#: How long nothing moves before what others want is evicted: until then it may be they who go on next.
STUCK_S = 0.5


@dataclass(eq=False)
class _Wish:
    """Items and their bytes. The answer has those that were not there, and are reserved now."""

    sizes: dict[str, int]
    granted: asyncio.Future[set[str]]
    since: float = field(default_factory=time.monotonic)


class Room:
    """Of one store and one event loop. First come, first served, unless nobody would be."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._queue: deque[_Wish] = deque()
        self._grants = 0
        self._moved = 0.0
        self._wanted: Counter[str] = Counter()
        self._untaken: dict[str, float] = {}
        self._serving = False
        #: Set while somebody waits.
        self.short = asyncio.Event()
        store.on_room = self._serve_soon

    @contextmanager
    def wanting(self, identifiers: Iterable[str]) -> Iterator[None]:
        """Do not evict these for what can do without room, nor as long as there is another way."""
        wanted = Counter([*identifiers])
        self._wanted += wanted
        try:
            yield
        finally:
            self._wanted -= wanted
            self._serve_soon()

    def keep_until_taken(self, identifier: str) -> None:
        """Somebody is about to read it: do not evict it before `taken`, for a time."""
        self._untaken.pop(identifier, None)
        self._untaken[identifier] = time.monotonic()

    def taken(self, identifiers: Iterable[str]) -> None:
        """Others have these. To be called now and then while somebody waits, if with nothing."""
        for identifier in identifiers:
            self._untaken.pop(identifier, None)
        self._serve()

    def untaken(self) -> list[str]:
        """What is kept for others, and still here."""
        oldest = time.monotonic() - UNTAKEN_S
        self._untaken = {one: at for one, at in self._untaken.items() if at > oldest and self._store.expects(one)}
        return [*self._untaken]

    def admit(self, identifier: str, total: int) -> bool:
        """Reserve room for an item at once, if nobody waits and nothing that is wanted has to go for it."""
        if self._queue or self._store.expects(identifier):
            return False
        if not self._store.make_room(total, self._kept({})):
            return False
        self._moved = time.monotonic()
        return self._store.admit(identifier, total) is not None

    def enough(self, total: int) -> bool:
        """Whether so many bytes can be had without waiting."""
        return not self._queue and self._store.could_make_room(total, self._kept({}))

    @asynccontextmanager
    async def hold(self, sizes: Mapping[str, int], timeout_s: float) -> AsyncIterator[set[str]]:
        """Hold these items, and wait for the room that those need which are not there (`sizes` in bytes).

        Answers the ones that the caller has got room for, and has to `commit` or `abandon`. Where even the whole store
        is too small for all, or the time is up, there is room for some of them or none.
        """
        fitting = self._fitting(sizes)
        reserved = await self._take(fitting, timeout_s)
        try:
            yield reserved
        finally:
            self._release(fitting)

    def _fitting(self, sizes: Mapping[str, int]) -> dict[str, int]:
        fitting: dict[str, int] = {}
        left = self._store.capacity
        for identifier, size in sorted(sizes.items(), key=lambda one: not self._store.expects(one[0])):
            if size <= left:
                fitting[identifier] = size
                left -= size
            elif size > self._store.capacity:
                self._store.admit(identifier, size)  # counts and says it
        return fitting

    async def _take(self, sizes: dict[str, int], timeout_s: float) -> set[str]:
        wish = _Wish(sizes, asyncio.get_running_loop().create_future())
        if all(map(self._store.expects, sizes)):
            self._grant(wish)
        else:
            if not self._queue:
                self._moved = time.monotonic()
            self._queue.append(wish)
            self._serve()
        try:
            if not wish.granted.done():
                await asyncio.wait([wish.granted], timeout=timeout_s)
        except asyncio.CancelledError:
            self._forget(wish)
            raise
        if not wish.granted.done():
            self._queue.remove(wish)
            self._hold(wish, {one for one, size in sizes.items() if self._store.admit(one, size) is not None})
            self._serve()
        return wish.granted.result()

    def _forget(self, wish: _Wish) -> None:
        if wish.granted.done():
            for identifier in wish.granted.result():
                self._store.abandon(identifier)
            self._release(wish.sizes)
        else:
            self._queue.remove(wish)
            self._serve_soon()

    def _hold(self, wish: _Wish, reserved: set[str]) -> None:
        self._grants += 1
        self._moved = time.monotonic()
        for identifier in wish.sizes:
            self._store.hold(identifier)
        wish.granted.set_result(reserved)

    def _release(self, sizes: dict[str, int]) -> None:
        self._grants -= 1
        self._moved = time.monotonic()
        for identifier in sizes:
            self._store.release(identifier)
        self._serve_soon()

    def _serve_soon(self) -> None:
        """The store may be in the middle of something."""
        if self._queue and not self._serving:
            self._serving = True
            self._queue[0].granted.get_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        while self._queue and self._grant(self._queue[0]):
            self._queue.popleft()
        if self._queue and not self._grants:
            self._unblock(self._queue[0])
        (self.short.set if self._queue else self.short.clear)()

    def _unblock(self, first: _Wish) -> None:
        """Nothing is held that would come free, and what others want is in the way of the first: let one of them go
        first who can, and else, or in the end, evict what they want."""
        now = time.monotonic()
        if now - first.since < STUCK_S:
            for wish in self._queue:
                if self._grant(wish):
                    self._queue.remove(wish)
                    return
        # Those that have not found all their items yet may soon go on by themselves.
        searching = self._wanted - Counter(one for wish in self._queue for one in wish.sizes)
        wanted = {} if now - self._moved > STUCK_S else searching
        if self._grant(first, {*wanted, *self.untaken(), *first.sizes}):
            self._queue.popleft()

    def _grant(self, wish: _Wish, keep: set[str] | None = None) -> bool:
        missing = {one: size for one, size in wish.sizes.items() if not self._store.expects(one)}
        total = sum(missing.values())
        if missing and not self._store.make_room(total, self._kept(wish.sizes) if keep is None else keep):
            return False
        for identifier, size in missing.items():
            self._store.admit(identifier, size)
        self._hold(wish, {*missing})
        return True

    def _kept(self, own: dict[str, int]) -> set[str]:
        return {*self._wanted, *self.untaken(), *own}
