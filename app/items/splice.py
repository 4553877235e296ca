"""Puts items into a prompt from their records: what vLLM makes of the prompt, without vLLM and without the media."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from app.errors.requests import InvalidRequest
from app.items.record import ItemRecord
from app.messages.media import MediaRef
from app.messages.prompts import Prompt, RenderedItem, RenderedPrompt


class Place(NamedTuple):
    """Where a medium stands in a prompt that is not expanded: its target is `tokens[start:end]`."""

    start: int
    end: int
    ref: MediaRef


def splice(prompt: Prompt, records: Mapping[str, ItemRecord]) -> RenderedPrompt:
    """The prompt with every item in its place, as vLLM renders it (but for the pixels).

    `records` has one for each identity of `prompt.media`; KeyError if not. Raises InvalidRequest, naming the item, when
    the prompt has no place for it.
    """
    tokens = prompt.token_ids
    token_ids: list[int] = []
    items: list[RenderedItem] = []
    at = 0
    for place in places(tokens, prompt.media, {ref.identity: records[ref.identity].target for ref in prompt.media}):
        record = records[place.ref.identity]
        token_ids += tokens[at : place.start]
        replacement = expanded(record.replacement)
        items.append(_placed(place.ref, record, len(token_ids), len(replacement)))
        token_ids += replacement
        at = place.end
    token_ids += tokens[at:]
    return RenderedPrompt(token_ids=token_ids, items=items, cache_salt=prompt.cache_salt)


def places(tokens: list[int], media: list[MediaRef], targets: Mapping[str, Sequence[int]]) -> Iterator[Place]:
    """The media's places, first to last. `targets` has what stands for each identity.

    Raises InvalidRequest, naming the medium, at the end if there are fewer places than media.
    """
    lines = _lines(media, targets)
    at = 0
    while line := _next(lines, tokens, at):
        _, ref = line.waiting.popleft()
        yield Place(line.start, line.end, ref)
        at = line.end
    _refuse_unplaced(lines)


def runs_of(tokens: Iterable[int]) -> list[tuple[int, int]]:
    """Token ids, run-length coded as (token, times)."""
    return [(token, sum(1 for _ in run)) for token, run in groupby(tokens)]


def expanded(runs: Iterable[tuple[int, int]]) -> list[int]:
    """The token ids that `runs_of` coded."""
    return [token for one, times in runs for token in [one] * times]


class _Line:
    """Items that wait for the same target, in vLLM's order, and where it occurs next."""

    def __init__(self, target: Sequence[int]) -> None:
        self.target = list(target)
        self.waiting: deque[tuple[int, MediaRef]] = deque()
        self.start = -1

    @property
    def end(self) -> int:
        return self.start + len(self.target)

    @property
    def rank(self) -> tuple[int, int, int]:
        return (self.start, self.end, self.waiting[0][0])

    def occurs(self, tokens: list[int], at: int) -> bool:
        """Whether the target occurs at `at` or later; `start` is the first place."""
        if self.start < at:
            self.start = _find(tokens, self.target, at)
        return self.start < len(tokens)


def _lines(media: list[MediaRef], targets: Mapping[str, Sequence[int]]) -> list[_Line]:
    """vLLM goes through the items modality by modality."""
    lines: dict[tuple[int, ...], _Line] = {}
    modalities = {modality: at for at, modality in enumerate(dict.fromkeys(ref.modality for ref in media))}
    for turn, ref in enumerate(sorted(media, key=lambda ref: modalities[ref.modality])):
        target = tuple(targets[ref.identity])
        lines.setdefault(target, _Line(target)).waiting.append((turn, ref))
    return list(lines.values())


def _next(lines: list[_Line], tokens: list[int], at: int) -> _Line | None:
    """vLLM's rule: the first match in the prompt wins, of two at one place the shorter, of two equal the first item."""
    found = [line for line in lines if line.waiting and line.occurs(tokens, at)]
    return min(found, key=lambda line: line.rank, default=None)


def _find(tokens: list[int], target: list[int], at: int) -> int:
    """Where `target` first occurs at `at` or later; the prompt's length if it does not."""
    first, stop = target[0], len(tokens) - len(target) + 1
    while at < stop:
        try:
            at = tokens.index(first, at, stop)
        except ValueError:
            break
        if tokens[at : at + len(target)] == target:
            return at
        at += 1
    return len(tokens)


def _placed(ref: MediaRef, record: ItemRecord, offset: int, length: int) -> RenderedItem:
    return RenderedItem(
        modality=ref.modality,
        identity=ref.identity,
        offset=offset,
        length=length,
        embed_runs=record.embed_runs,
        fields=record.fields,
    )


def _refuse_unplaced(lines: list[_Line]) -> None:
    unplaced = [ref for line in lines for _, ref in line.waiting]
    if unplaced:
        ref = unplaced[0]
        raise InvalidRequest(
            f"the prompt has no place for this {ref.modality}: the chat template left out its placeholder",
            param=ref.param,
        )
