"""A thread that makes and deletes the files of an embedding store: either takes milliseconds for a large one."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from app.tensors import segment
from workers.embeddings.store import EmbeddingStore


class FileThread:
    """One thing after the other: what had to go for a file has been deleted before the file is made."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "embeddings")
        store.delete = self._delete

    async def allocate(self, identifier: str, total: int) -> Path | None:
        """Make the file of an item for which there is room in the store.

        None, and the room is given back, if the file system has none. Cancelled, the room stays the caller's to give
        back.
        """
        part = self._store.part(identifier)
        making = asyncio.wrap_future(self._thread.submit(segment.allocate, part, total))
        try:
            await asyncio.shield(making)
        except OSError as error:
            self._store.no_memory(identifier, total, error)
            return None
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: made.cancelled() or made.exception())
            self._delete(part)
            raise
        return part.rename(self._store.reserved(identifier))

    async def settled(self) -> None:
        """Return once all that has left the store is deleted."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    async def close(self) -> None:
        self._store.delete = _unlink
        await asyncio.to_thread(self._thread.shutdown)

    def _delete(self, path: Path) -> None:
        self._thread.submit(_unlink, path)


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
