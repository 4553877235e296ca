"""What an engine publishes, without an engine: vLLM's own publisher, and its events of blocks of made-up prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

from workers.kv_events import sources
from workers.kv_events.subscription import Source


class Publisher:
    """`folder` has its sockets. A batch's time is its number."""

    def __init__(self, folder: Path, rank: int = 0, **config: Any) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher

        chosen = sources.config(folder)
        self.publisher = ZmqEventPublisher(rank, chosen.endpoint, chosen.replay_endpoint, **config)
        self.sent = 0

    @property
    def source(self) -> Source:
        llm = Plain(get_kv_event_sources=lambda: {0: self.publisher.get_publisher_config()})
        return sources.of(llm)[0]

    def send(self, *events: Any, count: int = 1) -> None:
        """Batches of these events, or of one that says little."""
        from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch

        for _ in range(count):
            self.publisher.publish(KVEventBatch(ts=self.sent, events=list(events or [AllBlocksCleared()])))
            self.sent += 1

    def lose(self, *events: Any, count: int = 1) -> None:
        """Batches that are numbered and kept, and never sent."""
        self.flush()
        real = self.publisher._pub
        self.publisher._pub = Plain(send_multipart=lambda parts: None)  # type: ignore[assignment]
        self.send(*events, count=count)
        self.flush()
        self.publisher._pub = real

    def flush(self) -> None:
        self.publisher._event_queue.join()

    def close(self) -> None:
        self.publisher.shutdown()


def stored(ids: Sequence[int], block_size: int, parent: Sequence[int] = ()) -> Any:
    """The event of the blocks of `ids`, which come after those of `parent`."""
    from vllm.distributed.kv_events import BlockStored

    whole = [*parent, *ids]
    hashes = [hash(tuple(whole[:end])) & (2**64 - 1) for end in range(block_size, len(whole) + 1, block_size)]
    before = len(parent) // block_size
    return BlockStored(
        block_hashes=hashes[before:],
        parent_block_hash=hashes[before - 1] if before else None,
        token_ids=list(ids),
        block_size=block_size,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def removed(whole: Sequence[int]) -> Any:
    """The event of the last block of a prompt."""
    from vllm.distributed.kv_events import BlockRemoved

    return BlockRemoved(block_hashes=[hash(tuple(whole)) & (2**64 - 1)], medium="GPU", group_idx=0)
