"""The chain of block names: equal for equal prompts, and different from any change on."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.routing.blocks import Span, chain, extend

CAPTURED: Any = {"capture_output": True, "text": True, "check": True, "timeout": 60}

tokens = st.integers(0, 2**32 - 1)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    block_size: int
    items: tuple[Span, ...] = ()
    adapter: str = ""
    salt: str = ""

    @property
    def chain(self) -> list[str]:
        return chain(self.token_ids, self.block_size, items=self.items, adapter=self.adapter, salt=self.salt)

    @property
    def blocks(self) -> int:
        return len(self.token_ids) // self.block_size


@st.composite
def prompts(draw: st.DrawFn, items: int = 3) -> Prompt:
    """A prompt of at least one block whose items lie one after the other."""
    size = draw(st.sampled_from([1, 4, 16]))
    ids = draw(st.lists(tokens, min_size=size, max_size=8 * size))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=2 * items)))
    spans = [Span(draw(names), begin, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]
    return Prompt(tuple(ids), size, tuple(spans), draw(st.just("") | names), draw(st.just("") | names))


def parts_from(one: Prompt, other: Prompt, block: int) -> bool:
    """Whether the chains are equal up to this block and different in each one from there on."""
    pairs = list(zip(one.chain, other.chain, strict=True))
    return all(a == b for a, b in pairs[:block]) and all(a != b for a, b in pairs[block:])


@given(prompts())
def test_one_name_for_each_full_block_and_all_of_them_different(prompt: Prompt) -> None:
    assert len(prompt.chain) == prompt.blocks == len(set(prompt.chain))
    assert all(len(name) == 16 and int(name, 16) >= 0 and name == name.lower() for name in prompt.chain)


@given(prompts(), st.data())
def test_another_token_changes_the_chain_from_its_block_on(prompt: Prompt, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, prompt.blocks * prompt.block_size - 1))
    other = data.draw(tokens.filter(lambda token: token != prompt.token_ids[at]))
    changed = replace(prompt, token_ids=(*prompt.token_ids[:at], other, *prompt.token_ids[at + 1 :]))
    assert parts_from(prompt, changed, at // prompt.block_size)


@given(prompts(), st.data())
def test_two_tokens_in_another_order_change_the_chain(prompt: Prompt, data: st.DataObject) -> None:
    places = st.integers(0, prompt.blocks * prompt.block_size - 1)
    first, second = sorted((data.draw(places), data.draw(places)))
    ids = list(prompt.token_ids)
    assume(ids[first] != ids[second])
    ids[first], ids[second] = ids[second], ids[first]
    assert parts_from(prompt, replace(prompt, token_ids=tuple(ids)), first // prompt.block_size)


@given(prompts(), st.data())
def test_another_picture_changes_the_chain_from_its_first_block_on(prompt: Prompt, data: st.DataObject) -> None:
    assume(prompt.items)
    at = data.draw(st.integers(0, len(prompt.items) - 1))
    item = prompt.items[at]
    other = item._replace(identity=data.draw(names.filter(lambda name: name != item.identity)))
    changed = replace(prompt, items=(*prompt.items[:at], other, *prompt.items[at + 1 :]))
    assert parts_from(prompt, changed, min(item.offset // prompt.block_size, prompt.blocks))


@given(prompts())
def test_a_picture_more_changes_the_chain_from_its_first_block_on(prompt: Prompt) -> None:
    assume(prompt.items)
    fewer = replace(prompt, items=prompt.items[:-1])
    assert parts_from(prompt, fewer, min(prompt.items[-1].offset // prompt.block_size, prompt.blocks))


@given(prompts())
def test_a_picture_one_token_later_changes_the_chain_from_where_it_was(prompt: Prompt) -> None:
    assume(prompt.items)
    item = prompt.items[-1]
    assume(item.offset + item.length < len(prompt.token_ids))
    moved = replace(prompt, items=(*prompt.items[:-1], item._replace(offset=item.offset + 1)))
    assert parts_from(prompt, moved, min(item.offset // prompt.block_size, prompt.blocks))


@given(prompts())
def test_two_pictures_in_another_order_change_the_chain(prompt: Prompt) -> None:
    assume(len(prompt.items) >= 2 and prompt.items[0].identity != prompt.items[1].identity)
    first, second, *rest = prompt.items
    swapped = (first._replace(identity=second.identity), second._replace(identity=first.identity), *rest)
    assert parts_from(prompt, replace(prompt, items=swapped), min(first.offset // prompt.block_size, prompt.blocks))


@given(prompts(), names)
@pytest.mark.parametrize("field", ["adapter", "salt"])
def test_adapter_and_salt_change_the_whole_chain(field: str, prompt: Prompt, other: str) -> None:
    assume(getattr(prompt, field) != other)
    assert parts_from(prompt, replace(prompt, **{field: other}), 0)


@given(prompts(), names)
def test_an_adapter_is_no_salt(prompt: Prompt, name: str) -> None:
    assert parts_from(replace(prompt, adapter=name, salt=""), replace(prompt, adapter="", salt=name), 0)


@given(prompts(), st.lists(tokens, max_size=20))
def test_what_follows_changes_nothing_before_it(prompt: Prompt, more: list[int]) -> None:
    longer = replace(prompt, token_ids=(*prompt.token_ids, *more))
    assert longer.chain[: prompt.blocks] == prompt.chain


@given(prompts(items=0), st.data())
def test_a_chain_can_be_made_in_pieces(prompt: Prompt, data: st.DataObject) -> None:
    whole = prompt.chain
    cut = data.draw(st.integers(1, prompt.blocks))
    at = cut * prompt.block_size
    head = extend(None, prompt.token_ids[:at], prompt.block_size, adapter=prompt.adapter, salt=prompt.salt)
    assert head + extend(head[-1], prompt.token_ids[at:], prompt.block_size) == whole


def test_a_picture_over_several_blocks_lies_in_each_of_them() -> None:
    ids = list(range(12))
    pieces = extend(None, ids, 4, [[("a", 2)], [("a", -2)], [("a", -6), ("b", 1)]])
    assert chain(ids, 4, items=[Span("b", 9, 3), Span("a", 2, 7)]) == pieces


def test_items_of_another_number_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="1 blocks for 2 blocks"):
        extend(None, list(range(8)), 4, [[]])


def test_the_names_are_stable() -> None:
    """Processes of different releases meet in one Redis, so what is hashed is part of the protocol."""

    def hashed(*parts: int | str) -> bytes:
        """Numbers in four bytes, least significant first; text after its length."""
        data = b""
        for part in parts:
            text = b"" if isinstance(part, int) else part.encode()
            data += struct.pack("<i", part) if isinstance(part, int) else struct.pack("<i", len(text)) + text
        return data

    root = blake2b(hashed(2, "ad\u00e9", "salt"), digest_size=8).digest()
    first = blake2b(root + hashed(7, 258, 1, "a"), digest_size=8).digest()
    second = blake2b(first + hashed(258, 3, -1, "a", 1, "b"), digest_size=8).digest()
    spans = [Span("a", 1, 2), Span("b", 3, 1)]
    assert chain([7, 258, 258, 3, 4], 2, items=spans, adapter="ad\u00e9", salt="salt") == [first.hex(), second.hex()]


def test_another_process_gives_the_same_names() -> None:
    code = "from app.routing.blocks import *; print(*chain(range(8), 4, items=[Span('a', 3, 2)], salt='tenant'))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "7"}, **CAPTURED)
    assert done.stdout.split() == chain(range(8), 4, items=[Span("a", 3, 2)], salt="tenant")
