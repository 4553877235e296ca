"""The shared memory of a worker's embeddings."""

from __future__ import annotations

from pathlib import Path

from app.settings import Settings
from app.tensors import folder
from workers.embeddings.store import EmbeddingStore


class EmbeddingMemory:
    """Made before the engine, which writes into it and reads from it."""

    def __init__(self, settings: Settings, worker_id: str) -> None:
        capacity = int(settings.multimodal_embedding_cache_capacity_gb * 1e9)
        root = Path(settings.tensors.directory)
        folder.check_room(root, capacity, "multimodal_embedding_cache_capacity_gb")
        self.folder = folder.make_folder(root, worker_id)
        self.store = EmbeddingStore(self.folder.path / "embeddings", capacity)

    @property
    def embeddings(self) -> Path | None:
        """Where the engine's connector finds them; None when none are kept."""
        return self.store.directory if self.store.capacity else None

    def close(self) -> None:
        self.store.clear()
        self.folder.remove()
