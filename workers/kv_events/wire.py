"""vLLM's KV cache events as it sends them, in msgpack (`vllm/distributed/kv_events.py`): what is needed of them.

A contract test compares it with vLLM's own classes.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: How an engine calls a block: the last 64 bits of its own hash, or all of it.
EngineHash = int | bytes

#: Where blocks lie that a request finds at once; others are in tiers that connectors keep.
MAIN_MEDIUM = "GPU"


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that were filled, one after the other; `parent_block_hash` is the block before them.

    An entry of `extra_keys` has what a block's hash depends on besides its tokens, untagged and in this order: the
    adapter's name, if there is one; (identifier, offset from the block's start) of each item in it; in a prompt's first
    block the cache salt; the digest of prompt embeddings.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks whose place went to others. One that the engine holds twice is removed twice."""

    block_hashes: list[EngineHash]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The whole prefix cache is gone."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """The events of one engine step."""

    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


#: From bytes to a Batch. Raises msgspec.DecodeError.
decode = msgspec.msgpack.Decoder(Batch).decode
