"""From an engine's events to the names of the blocks that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.routing.blocks import Placed, extend
from workers.kv_events.wire import MAIN_MEDIUM, Batch, Cleared, EngineHash, Removed, Stored

#: Kinds of layers whose blocks a prompt needs from its first token on. A hybrid model has others beside them, with
#: groups of blocks of their own: sliding windows and states, which need the last tokens only, drop a prefix's blocks
#: from the front, and never hold more of it.
FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class Names(Protocol):
    """Where the names go."""

    def add(self, names: Sequence[str]) -> None: ...
    def remove(self, names: Iterable[str]) -> None: ...
    def clear(self) -> None: ...


@dataclass
class Counts:
    """Blocks that the engine `stored` and `removed`, and how often it `cleared` its cache.

    Of the blocks that are not taken up some are `ignored`, those of other layers or tiers; the parent of `orphans` is
    not known; those `unnamed` can have no name.
    """

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    ignored: int = 0
    orphans: int = 0
    unnamed: int = 0


class Ledger:
    """The blocks of one engine, by its hash and by our name.

    vLLM does not join equal blocks: two requests that prefill the same prompt at once store each block twice, and
    each of the two is removed. A name goes with the last of them. So a block's parent goes after it: whoever gives
    blocks back gives the last one first, and whoever uses a block uses its parents.
    """

    def __init__(self, block_size: int, names: Names) -> None:
        self.counts = Counts()
        self._block_size = block_size
        self._held = names
        self._names: dict[EngineHash, str] = {}
        self._copies: dict[EngineHash, int] = {}  # beyond the first
        self._group: int | None = None
        self._counting = True

    def take(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, Stored):
                if self._is_followed(event):
                    self._store(event)
                else:
                    self.counts.ignored += len(event.block_hashes)
            elif isinstance(event, Removed):
                if event.medium == MAIN_MEDIUM and event.group_idx == self._group:
                    self._remove(event)
            elif isinstance(event, Cleared):
                self.counts.cleared += 1
                self.forget()

    def expect_reports(self) -> None:
        """From now on blocks may be reported that were stored before, which cannot be told from second copies. So there
        are none: a name may go too early, and never stays too long."""
        self._counting = False

    def forget(self) -> None:
        """Begin anew: blocks become known again as they are stored, or reported."""
        self._names.clear()
        self._copies.clear()
        self._held.clear()

    def _is_followed(self, event: Stored) -> bool:
        """Whether these are blocks of the one group that is followed."""
        if event.medium != MAIN_MEDIUM or event.block_size != self._block_size:
            return False
        if self._group is None and event.kv_cache_spec_kind in FULL_ATTENTION:
            self._group = event.group_idx
        return self._group is not None and event.group_idx == self._group

    def _store(self, event: Stored) -> None:
        blocks = len(event.block_hashes)
        parent = None
        if event.parent_block_hash is not None and (parent := self._names.get(event.parent_block_hash)) is None:
            self.counts.orphans += blocks
            return
        if (names := self._name(event, parent)) is None:
            self.counts.unnamed += blocks
            return
        for block, name in zip(event.block_hashes, names, strict=True):
            if block not in self._names:
                self._names[block] = name
            elif self._counting:
                self._copies[block] = self._copies.get(block, 0) + 1
        self.counts.stored += blocks
        self._held.add(names)

    def _name(self, event: Stored, parent: str | None) -> list[str] | None:
        """None for blocks that depend on something else than names are made of, which is prompt embeddings."""
        keys = [one or [] for one in event.extra_keys or ()]
        whole = len(event.token_ids) == len(event.block_hashes) * self._block_size
        if not whole or len(keys) not in (0, len(event.block_hashes)):
            return None
        if any(isinstance(one, bytes) for block in keys for one in block):
            return None
        adapter = event.lora_name or ""
        # Texts are the adapter's name, if there is one, and then the salt.
        texts = [one for one in (keys[0] if keys else ()) if isinstance(one, str)]
        salt = next(iter(texts[1:] if adapter else texts), "")
        items = [_items(block, adapter) for block in keys]
        return extend(parent, event.token_ids, self._block_size, items, adapter=adapter, salt=salt)

    def _remove(self, event: Removed) -> None:
        gone = []
        for block in event.block_hashes:
            if copies := self._copies.pop(block, 0):
                if copies > 1:
                    self._copies[block] = copies - 1
            elif (name := self._names.pop(block, None)) is not None:
                gone.append(name)
        self.counts.removed += len(event.block_hashes)
        self._held.remove(gone)


def _items(keys: list[Any], adapter: str) -> list[Placed]:
    # Where the adapter changes the encoder too, vLLM puts its name before the item's.
    prefix = f"{adapter}:" if adapter else ""
    return [(one[0].removeprefix(prefix), one[1]) for one in keys if isinstance(one, list)]
