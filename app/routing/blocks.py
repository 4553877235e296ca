"""The names of a prompt's KV blocks: one chain of hashes, the same for the router and for what workers publish.

A block is named by everything that its KV depends on: its tokens, the items in it and where they lie, and all of that
of the blocks before it; the first one also by adapter and cache salt. Names are blake2b-64, in hexadecimal, over bytes
of fixed width and order, so they agree between processes, machines and Python versions. They only choose workers: an
engine compares its own hashes, so two prompts that share a name cost a detour and never a wrong answer.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

#: Bytes of a name, which is written as twice as many hexadecimal digits.
NAME_BYTES = 8

#: An item in a block, and where it begins, in tokens from the block's start: below 0 if it began in an earlier block.
Placed = tuple[str, int]


class Span(NamedTuple):
    """An item's placeholder in a prompt, in tokens. `identity` names the item by its content."""

    identity: str
    offset: int
    length: int


def chain(
    token_ids: Sequence[int], block_size: int, *, items: Sequence[Span] = (), adapter: str = "", salt: str = ""
) -> list[str]:
    """One name for each full block of `block_size` tokens; the tokens after the last full block have none."""
    placed = _placed(items, block_size, len(token_ids) // block_size)
    return extend(None, token_ids, block_size, placed, adapter=adapter, salt=salt)


def extend(
    parent: str | None,
    token_ids: Sequence[int],
    block_size: int,
    items: Sequence[Sequence[Placed]] = (),
    *,
    adapter: str = "",
    salt: str = "",
) -> list[str]:
    """The names of the blocks that follow the one named `parent`; None stands before a prompt's first block.

    `items` has one entry for each full block, or none at all. `adapter` and `salt` count at the first block only: a
    parent's name holds them already. Raises ValueError if the entries are not as many as the blocks.
    """
    blocks = len(token_ids) // block_size
    if items and len(items) != blocks:
        raise ValueError(f"items of {len(items)} blocks for {blocks} blocks")
    last = bytes.fromhex(parent) if parent is not None else _root(block_size, adapter, salt)
    data = _bytes(token_ids)
    width = 4 * block_size
    names = []
    for i in range(blocks):
        block = last + data[i * width : (i + 1) * width]
        if items and items[i]:
            block += b"".join(_number(offset) + _text(identity) for identity, offset in items[i])
        last = blake2b(block, digest_size=NAME_BYTES).digest()
        names.append(last.hex())
    return names


def _placed(items: Sequence[Span], block_size: int, blocks: int) -> list[list[Placed]]:
    """The items of each block, as vLLM counts them (`_gen_mm_extra_hash_keys`): an item lies in every block that its
    placeholder touches. Of those that overlap, it does not where one before it goes on into the next block, and none
    does after the end of the last."""
    if not items:
        return []
    placed: list[list[Placed]] = [[] for _ in range(blocks)]
    in_order = sorted(items, key=lambda item: item.offset)
    blocks = min(blocks, -(-_end(in_order[-1]) // block_size))
    taken = 0  # blocks that an earlier item goes on from
    for item in in_order:
        end = -(-_end(item) // block_size)
        for i in range(max(taken, item.offset // block_size), min(blocks, end)):
            placed[i].append((item.identity, item.offset - i * block_size))
        taken = max(taken, end - 1)
    return placed


def _end(item: Span) -> int:
    return item.offset + item.length


def _root(block_size: int, adapter: str, salt: str) -> bytes:
    return blake2b(_number(block_size) + _text(adapter) + _text(salt), digest_size=NAME_BYTES).digest()


def _bytes(token_ids: Sequence[int]) -> bytes:
    """The tokens as unsigned 32-bit numbers, least significant byte first."""
    numbers = array("I", token_ids)
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers.tobytes()


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


def _text(value: str) -> bytes:
    data = value.encode()
    return _number(len(data)) + data
