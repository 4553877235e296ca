"""What the router sees of a prompt: exact, for any model, as far as its media have been seen before.

An item that the cluster has seen has a record of the tokens that take its placeholder's place. One that nobody has
seen cannot be in any KV cache: there the view ends, and what stands before it still counts.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.errors.serving import BrokerUnavailable
from app.items.index import ItemIndex
from app.items.record import ItemRecord
from app.items.splice import Place, expanded, places
from app.messages.media import MediaRef, Modality
from app.messages.prompts import Prompt
from app.registry import Fleet
from app.routing.base import View
from app.routing.blocks import Span, chain

log = logging.getLogger(__name__)

#: Items whose expansion a process remembers: it is the same for ever, and a few hundred bytes.
REMEMBERED = 20_000
#: Tokens of a medium, while none of its kind has been seen.
GUESS = 1024


@dataclass(frozen=True)
class Expansion:
    """What an item becomes in a prompt: `runs` of (token, times) where `target` stood."""

    target: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    length: int


class Views:
    """Looks at prompts for the router. `index` has the records of the items."""

    def __init__(self, index: ItemIndex) -> None:
        self._index = index
        self._known: OrderedDict[str, Expansion] = OrderedDict()
        self._typical: dict[Modality, int] = {}

    async def of(self, prompt: Prompt, fleet: Fleet, adapter: str = "") -> View:
        """The prompt's blocks, in the fleet's block size. Redis being away makes every item an unseen one."""
        seen = await self._seen(prompt.media)
        tokens, spans, end = self._spliced(prompt, seen, fleet.placeholders(self._index.namespace))
        size = fleet.block_size
        blocks = chain(tokens, size, items=spans, adapter=adapter, salt=prompt.cache_salt or "") if size else []
        if end is None:
            return View(tuple(blocks), len(tokens))
        unseen = [ref for ref in prompt.media if ref.identity not in seen]
        known = sum(seen[ref.identity].length for ref in prompt.media if ref.identity in seen)
        length = len(prompt.token_ids) + known + sum(self._typical.get(ref.modality, GUESS) for ref in unseen)
        return View(tuple(blocks), max(length, len(tokens)), exact=False)

    async def _seen(self, media: Sequence[MediaRef]) -> dict[str, Expansion]:
        """The expansions of those of the media that somebody has encoded. New ones take one more round trip, once."""
        wanted = {ref.identity for ref in media}
        seen = {identity: self._known[identity] for identity in wanted if identity in self._known}
        for identity in seen:
            self._known.move_to_end(identity)
        new = sorted(wanted - seen.keys())
        if not new:
            return seen
        try:
            found = await self._index.find(new)
        except BrokerUnavailable as error:
            log.warning("the router sees a prompt only up to its first new medium: %s", error)
            return seen
        records = {identity: one.record for identity, one in found.items() if one.record is not None}
        return seen | {identity: self._remember(identity, record) for identity, record in records.items()}

    def _remember(self, identity: str, record: ItemRecord) -> Expansion:
        runs = tuple(record.replacement)
        one = Expansion(tuple(record.target), runs, sum(times for _, times in runs))
        self._known[identity] = one
        typical = self._typical.get(record.modality, one.length)
        self._typical[record.modality] = (7 * typical + one.length) // 8
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return one

    def _spliced(
        self, prompt: Prompt, seen: Mapping[str, Expansion], placeholders: Mapping[Modality, Sequence[int]]
    ) -> tuple[list[int], list[Span], int | None]:
        """The prompt's tokens and spans, and where in the unexpanded prompt they end; None: they are the whole."""
        targets = {ref.identity: _target(ref, seen, placeholders) for ref in prompt.media}
        if not all(targets.values()):  # where an item of this kind would stand, nobody has said yet
            return [], [], 0
        tokens: list[int] = []
        spans: list[Span] = []
        at = 0
        for place in places(prompt.token_ids, prompt.media, targets):
            tokens += prompt.token_ids[at : place.start]
            if place.ref.identity not in seen:
                return tokens, spans, place.start
            at = self._put(place, seen[place.ref.identity], tokens, spans)
        return tokens + prompt.token_ids[at:], spans, None

    @staticmethod
    def _put(place: Place, one: Expansion, tokens: list[int], spans: list[Span]) -> int:
        spans.append(Span(place.ref.identity, len(tokens), one.length))
        tokens += expanded(one.runs)
        return place.end


def _target(
    ref: MediaRef, seen: Mapping[str, Expansion], placeholders: Mapping[Modality, Sequence[int]]
) -> Sequence[int]:
    known = seen.get(ref.identity)
    return known.target if known is not None else placeholders.get(ref.modality, ())
