"""At the start: an item through the engine's encoder into the store, so that what does not work is known at once."""

from __future__ import annotations

import logging

from app.messages.media import Modality
from app.tensors import segment
from workers.embeddings.store import EmbeddingStore
from workers.engine import Engine
from workers.items.encoder import Width

log = logging.getLogger(__name__)

#: More bytes than any encoder gives for a token: room for the first item, whose size nobody knows yet.
MOST_BYTES_PER_TOKEN = 1 << 18


class EncoderBroken(RuntimeError):
    """The engine encoded an item and its embedding did not come out."""


async def learn_widths(engine: Engine, store: EmbeddingStore) -> dict[Modality, Width]:
    """What the encoder gives for each modality of the model. Raises EncoderBroken."""
    return {modality: await _learn(engine, store, modality) for modality in engine.renderer.modalities()}


async def _learn(engine: Engine, store: EmbeddingStore, modality: Modality) -> Width:
    identity = f"self-check-{modality}"
    alone = await engine.renderer.sample(modality, identity)
    store.hold(identity)
    try:
        room = min(store.capacity, segment.PAGE + alone.embeds * MOST_BYTES_PER_TOKEN)
        if store.reserve(identity, room) is None:
            raise EncoderBroken("multimodal_embedding_cache_capacity_gb is too small for a single item")
        await engine.encode(alone.engine_input, identity)
        path = store.commit(identity)
        if path is None:
            raise EncoderBroken(f"the engine did not save the embedding of a small {modality}; see its log")
        header = segment.read_header(path)
        rows, width = header.shape
        if rows != alone.embeds:
            raise EncoderBroken(f"the encoder gave {rows} rows for a {modality} with {alone.embeds} placeholder tokens")
        log.info("encoder: %s, %d x %s for each placeholder token", modality, width, header.dtype)
        return Width(width, header.dtype, tuple(alone.target))
    finally:
        store.abandon(identity)
        store.release(identity)
        store.remove(identity)
