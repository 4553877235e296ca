"""Embeddings of one worker: files in shared memory, the least recently used of which go first."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from app.errors.tensors import TensorError
from app.tensors import segment

log = logging.getLogger(__name__)

#: What a file is called while it is reserved and not yet written. The writer renames it.
NEW = ".new"
#: What a file that was dropped is called until it is deleted.
GONE = ".gone"
#: What a file is called while its memory is allocated.
PART = ".part"
_OURS = re.compile(r"[0-9a-f]{32}(\.new)?(\.[0-9]+\.(gone|part))?")
#: Seconds between two log lines that say that everything is in use.
FULL_LOG_S = 60.0


def final(reserved: Path) -> Path:
    """The name that a writer gives a reserved file once all of it is there."""
    return reserved.with_name(reserved.name.removesuffix(NEW))


@dataclass
class Counts:
    """How the store has fared since its start, in items.

    `hits` and `misses` are of `path`, `too_large` items larger than the capacity, `full` those for which held ones left
    no room or the file system had none.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evictions: int = 0
    too_large: int = 0
    full: int = 0


class EmbeddingStore:
    """Owns a directory: `capacity` bytes at most, header pages and reservations included. For one thread.

    An item is written in three steps: `reserve` or `admit`, the writing, which somebody else may do, and `commit` or
    `abandon` by whoever reserved. A held item is not evicted. Three that may be set later: `on_evict` is told of every
    item that goes, by `remove` and `clear` too, before its file does; `on_room` is told whenever there may be more room
    than before; `delete` gets files that have left the store under names of no meaning, and deletes them later.
    """

    def __init__(self, directory: Path, capacity: int, on_evict: Callable[[str], None] | None = None) -> None:
        self.directory = directory
        self.capacity = capacity
        self.counts = Counts()
        self.on_evict = on_evict
        self.on_room: Callable[[], None] = lambda: None
        self.delete: Callable[[Path], None] = _unlink
        self._numbers = count()
        self._entries: OrderedDict[str, int] = OrderedDict()
        self._reserved: dict[str, int] = {}
        self._holds: Counter[str] = Counter()
        self._size = 0
        self._said_too_large: set[int] = set()
        self._said_full = -FULL_LOG_S
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in directory.iterdir():
            if _OURS.fullmatch(left.name):
                left.unlink()

    @property
    def size(self) -> int:
        """Bytes stored and reserved."""
        return self._size

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, identifier: str) -> bool:
        """Whether it is stored; changes nothing."""
        return identifier in self._entries

    def expects(self, identifier: str) -> bool:
        """Whether it is stored, or reserved by somebody."""
        return identifier in self._entries or identifier in self._reserved

    def path(self, identifier: str) -> Path | None:
        """Look an item up: a use, and a hit or a miss. Unless it is held it may go at the next `reserve` or `admit`."""
        if identifier not in self._entries:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self._entries.move_to_end(identifier)
        return self._final(identifier)

    def hold(self, identifier: str) -> None:
        """Keep it until as many `release`; one that is not stored yet is kept from its `commit` on."""
        self._holds[identifier] += 1

    def release(self, identifier: str) -> None:
        if self._holds[identifier] <= 0:
            raise ValueError(f"embedding {identifier!r} was released more often than held")
        self._holds[identifier] -= 1
        if not self._holds[identifier]:
            del self._holds[identifier]
            self.on_room()

    def reserve(self, identifier: str, total: int) -> Path | None:
        """Make room and allocate the file that a writer fills and renames to `final`; `total` with the header page.

        None when it is stored or reserved already, larger than the capacity, or when there is no room.
        """
        if not self.admit(identifier, total):
            return None
        path = self.reserved(identifier)
        try:
            segment.allocate(path, total)
        except OSError as error:
            self.no_memory(identifier, total, error)
            return None
        return path

    def admit(self, identifier: str, total: int, keep: Container[str] = ()) -> Path | None:
        """Make room, without evicting what to `keep`, for a file of at most `total` bytes that somebody else creates at
        the path answered, or at `reserved` to rename it.

        None as in `reserve`.
        """
        if self.expects(identifier):
            return None
        if total > self.capacity:
            self._too_large(total)
            return None
        if not self.make_room(total, keep):
            self._no_room(f"everything in {self.directory} is in use ({self._size} of {self.capacity} bytes)")
            return None
        self._reserved[identifier] = total
        self._size += total
        return self._final(identifier)

    def make_room(self, total: int, keep: Container[str] = ()) -> bool:
        """Evict until there is room for `total` bytes, nothing if there cannot be enough of it. Counts no failure."""
        victims = self._victims(total, keep)
        for identifier in victims or ():
            self._drop(identifier)
        self.counts.evictions += len(victims or ())
        return victims is not None

    def could_make_room(self, total: int, keep: Container[str] = ()) -> bool:
        return self._victims(total, keep) is not None

    def _victims(self, total: int, keep: Container[str]) -> list[str] | None:
        """What has to go for `total` bytes; None if that is not enough."""
        victims, free = [], self.capacity - self._size
        for identifier, size in self._entries.items():
            if free >= total:
                break
            if not self._holds[identifier] and identifier not in keep:
                victims.append(identifier)
                free += size
        return victims if free >= total else None

    def no_memory(self, identifier: str, total: int, error: OSError) -> None:
        """The file system has no room for what was reserved, which is given back."""
        self.abandon(identifier)
        self._no_room(f"no memory for {total} bytes in {self.directory}: {error}")

    def commit(self, identifier: str) -> Path | None:
        """The writing is over. None, and the room is free again, if the file is not there or not what was reserved."""
        total = self._reserved.pop(identifier, None)
        if total is None:
            raise ValueError(f"embedding {identifier!r} has no reservation to commit")
        self._discard(self.reserved(identifier))
        path = self._final(identifier)
        size = self._written(path, identifier, total)
        self._size += (size or 0) - total
        if size is None:
            self._discard(path)
        else:
            self._entries[identifier] = size
            self.counts.stored += 1
        self.on_room()
        return None if size is None else path

    def abandon(self, identifier: str) -> None:
        """Give a reservation back, if there is one, with whatever was written."""
        total = self._reserved.pop(identifier, None)
        if total is not None:
            self._size -= total
            self._discard(self.reserved(identifier))
            self._discard(self._final(identifier))
            self.on_room()

    def remove(self, identifier: str) -> None:
        """Drop an item, held or not, if it is stored."""
        if identifier in self._entries:
            self._drop(identifier)

    def clear(self) -> None:
        """Drop everything, held or not, and all reservations."""
        for identifier in [*self._entries]:
            self._drop(identifier)
        for identifier in [*self._reserved]:
            self.abandon(identifier)

    def reserved(self, identifier: str) -> Path:
        """The file that a writer fills."""
        return self.directory / (segment.file_name(identifier) + NEW)

    def part(self, identifier: str) -> Path:
        """A name for the file to be, while its memory is allocated."""
        return self.directory / f"{segment.file_name(identifier)}.{next(self._numbers)}{PART}"

    def _final(self, identifier: str) -> Path:
        return self.directory / segment.file_name(identifier)

    def _drop(self, identifier: str) -> None:
        if self.on_evict is not None:
            self.on_evict(identifier)
        self._size -= self._entries.pop(identifier)
        self._discard(self._final(identifier))
        self.on_room()

    def _discard(self, path: Path) -> None:
        """Renamed first: whenever it is deleted, a file that has its name by then stays."""
        gone = path.with_name(f"{path.name}.{next(self._numbers)}{GONE}")
        with suppress(FileNotFoundError):
            path.rename(gone)
            self.delete(gone)

    def _written(self, path: Path, identifier: str, total: int) -> int | None:
        """Size of a file that is whole and no larger than was reserved."""
        try:
            size = path.stat().st_size
            header = segment.read_header(path)
        except FileNotFoundError:
            return None
        except (OSError, TensorError) as error:
            log.error("embedding %r: the file written for it cannot be read: %s", identifier, error)
            return None
        if header.name != identifier or size > total:
            log.error("embedding %r: the file written for it holds %r, %d bytes", identifier, header.name, size)
            return None
        return size

    def _too_large(self, total: int) -> None:
        self.counts.too_large += 1
        if total.bit_length() not in self._said_too_large:
            self._said_too_large.add(total.bit_length())
            log.warning(
                "an embedding of %d bytes is larger than the whole embedding cache (%d bytes) and is not kept: raise "
                "multimodal_embedding_cache_capacity_gb (or capacity_gb) to hold it",
                total,
                self.capacity,
            )

    def _no_room(self, why: str) -> None:
        self.counts.full += 1
        now = time.monotonic()
        if now - self._said_full >= FULL_LOG_S:
            self._said_full = now
            log.warning("an embedding is not kept: %s", why)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
