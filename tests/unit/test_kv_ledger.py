"""workers.kv_events.ledger: an engine's events become the names that a router computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.blocks import Span, chain
from workers.kv_events.ledger import Ledger
from workers.kv_events.wire import Batch, Cleared, Removed, Stored

BLOCK = 4


class Names:
    """Each name is added once before it is removed, and the other way round."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        self.held |= {*names}

    def remove(self, names: Iterable[str]) -> None:
        gone = {*names}
        assert gone <= self.held
        self.held -= gone

    def clear(self) -> None:
        self.held.clear()


class Engine:
    """A ledger, and the events that bring it blocks 0, 1, 2, ... of prompts of its own."""

    def __init__(self) -> None:
        self.names = Names()
        self.ledger = Ledger(BLOCK, self.names)

    def take(self, *events: Any) -> None:
        self.ledger.take(Batch(0.0, list(events)))

    @property
    def held(self) -> set[str]:
        return self.names.held


@pytest.fixture
def engine() -> Engine:
    return Engine()


def stored(ids: list[int], hashes: list[Any], parent: Any = None, **more: Any) -> Stored:
    given: dict[str, Any] = {
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "block_size": BLOCK,
        **more,
    }
    return Stored(hashes, parent, ids, **given)


def removed(*hashes: Any, group: int = 0, medium: str = "GPU") -> Removed:
    return Removed(list(hashes), medium, group)


def test_blocks_get_the_names_of_the_prompt(engine: Engine) -> None:
    ids = list(range(12))
    engine.take(stored(ids[:8], [101, 102]), stored(ids[8:], [103], parent=102))
    assert engine.held == {*chain(ids, BLOCK)} and engine.ledger.counts.stored == 3


def test_items_adapter_and_salt_are_taken_from_the_events(engine: Engine) -> None:
    ids = list(range(12))
    keys = [["ad", ["pic", 2], "salt"], ["ad", ["pic", -2], ["film", 3]], ["ad", ["film", -1]]]
    engine.take(stored(ids[:8], [1, 2], lora_name="ad", extra_keys=keys[:2]))
    engine.take(stored(ids[8:], [3], parent=2, lora_name="ad", extra_keys=keys[2:]))
    items = [Span("pic", 2, 4), Span("film", 7, 2)]
    assert engine.held == {*chain(ids, BLOCK, items=items, adapter="ad", salt="salt")}


def test_a_salt_without_an_adapter_is_no_adapter(engine: Engine) -> None:
    engine.take(stored([1, 2, 3, 4], [1], extra_keys=[["salt"]]))
    assert engine.held == {*chain([1, 2, 3, 4], BLOCK, salt="salt")}


def test_an_items_name_is_its_own_where_the_adapter_changes_the_encoder(engine: Engine) -> None:
    engine.take(stored([1, 2, 3, 4], [1], lora_name="ad", extra_keys=[["ad", ["ad:pic", 0]]]))
    assert engine.held == {*chain([1, 2, 3, 4], BLOCK, items=[Span("pic", 0, 2)], adapter="ad")}


def test_hashes_may_be_whole(engine: Engine) -> None:
    engine.take(stored([1, 2, 3, 4], [b"x" * 32]), stored([5, 6, 7, 8], [b"y" * 32], parent=b"x" * 32))
    assert engine.held == {*chain(range(1, 9), BLOCK)}


def test_a_block_that_was_stored_twice_is_held_until_both_are_gone(engine: Engine) -> None:
    for _ in range(3):
        engine.take(stored([1, 2, 3, 4], [1]))
    engine.take(removed(1), removed(1))
    assert len(engine.held) == 1
    engine.take(removed(1))
    assert not engine.held
    engine.take(removed(1))
    assert not engine.held, "what is not known cannot go"


def test_a_cleared_cache_holds_nothing(engine: Engine) -> None:
    engine.take(stored([1, 2, 3, 4], [1]), stored([1, 2, 3, 4], [1]), Cleared())
    assert not engine.held
    engine.take(stored([1, 2, 3, 4], [1]), removed(1))
    assert not engine.held, "copies from before count no more"


def test_blocks_that_follow_unknown_ones_have_no_names(engine: Engine) -> None:
    engine.take(stored([1, 2, 3, 4], [2], parent=1))
    engine.take(stored([5, 6, 7, 8], [3], parent=2))
    assert not engine.held and engine.ledger.counts.orphans == 2


def test_what_was_forgotten_is_learnt_when_it_is_reported(engine: Engine) -> None:
    ids = list(range(8))
    engine.take(stored(ids, [1, 2]))
    engine.ledger.forget()
    engine.ledger.expect_reports()
    assert not engine.held
    engine.take(stored(ids[:4], [1]), stored(ids[4:], [2], parent=1), stored(ids, [1, 2]))
    assert engine.held == {*chain(ids, BLOCK)}
    engine.take(removed(2))
    assert engine.held == {*chain(ids[:4], BLOCK)}, "reports are no second copies"


@pytest.mark.parametrize(
    "other",
    [
        {"medium": "CPU"},
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"},
        {"group_idx": 1, "kv_cache_spec_kind": "full_attention"},
        {"block_size": 2, "hashes": [7, 8]},
    ],
)
def test_blocks_of_other_layers_and_tiers_do_not_count(engine: Engine, other: dict[str, Any]) -> None:
    engine.take(stored([1, 2, 3, 4], [1]))
    before = set(engine.held)
    engine.take(stored([5, 6, 7, 8], other.pop("hashes", [7]), **other))
    assert engine.held == before and engine.ledger.counts.ignored
    engine.take(removed(1, group=other.get("group_idx", 0), medium="CPU" if "medium" in other else "GPU"))
    assert bool(engine.held) == ("medium" in other or "group_idx" in other)


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "unknown", None])
def test_an_engine_without_full_attention_tells_of_no_block(engine: Engine, kind: str | None) -> None:
    engine.take(stored([1, 2, 3, 4], [1], kv_cache_spec_kind=kind))
    assert not engine.held and engine.ledger.counts.ignored == 1


def test_blocks_with_prompt_embeddings_and_what_follows_them_have_no_names(engine: Engine) -> None:
    engine.take(stored([0] * 8, [1, 2], extra_keys=[None, [b"digest"]]))
    engine.take(stored([1, 2, 3, 4], [3], parent=2))
    assert not engine.held and engine.ledger.counts.unnamed == 2 and engine.ledger.counts.orphans == 1


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=12), st.data())
def test_a_held_block_is_one_whose_ancestors_are_held(prompts: list[list[int]], data: st.DataObject) -> None:
    """Whatever is stored, if it is removed as vLLM does: of each request the last block first."""
    engine = Engine()
    queue: list[tuple[int, ...]] = []
    for prompt in prompts:
        paths = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        engine.take(stored(_tokens(prompt), [hash(path) for path in paths]))
        queue += reversed(paths)
    for _ in range(data.draw(st.integers(0, len(queue)))):
        engine.take(removed(hash(queue.pop(0))))
        ancestors = {path[: i + 1] for path in queue for i in range(len(path))}
        assert engine.held == {chain(_tokens(path), BLOCK)[-1] for path in ancestors}


def _tokens(path: Sequence[int]) -> list[int]:
    return [token for token in path for _ in range(BLOCK)]
