"""Shared memory for the media that this process holds, and the way in which workers read them."""

from __future__ import annotations

from pathlib import Path

from app.media import MediaHolder
from app.media.places import MediaPlaces
from app.settings import Settings
from app.tensors import folder
from app.tensors.plane import TensorPlane


class MediaMemory:
    """`holder` takes media from `start` on. Raises a ValueError when the memory that the settings want is not there."""

    def __init__(self, settings: Settings, places: MediaPlaces) -> None:
        capacity = int(settings.tensors.media_gb * 1e9)
        root = Path(settings.tensors.directory)
        folder.check_room(root, capacity, "tensors.media_gb")
        self._folder = folder.make_folder(root, "api")
        self._plane = TensorPlane(self._folder.path, settings.tensors, settings.engine.nixl_progress_delay_us)
        self.holder = MediaHolder(self._plane, self._folder.path, capacity, places)

    async def start(self) -> None:
        await self._plane.start()

    async def close(self) -> None:
        """Whatever fails, no file is left."""
        try:
            await self.holder.close()
        finally:
            self.remove()
            await self._plane.close()

    def remove(self) -> None:
        """Delete the memory, for a process that ends at once."""
        self._folder.remove()
