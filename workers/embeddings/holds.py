"""What the requests of an engine hold of the embedding store, from their first scheduling to their end.

Two things kill a vLLM engine: an encoder that has to run on an item without pixels, and an embedding that is gone when
it is to be loaded. So every request takes hold of its items' files before it is first scheduled, and one that lacks an
embedding it cannot do without is failed on its own. A request that was preempted finds what it holds still there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from app.errors.tensors import TensorError

log = logging.getLogger(__name__)


class Source(Protocol):
    """Where stored embeddings come from."""

    def take(self, identifier: str) -> Path | None:
        """A file that stays until it is given back, or None."""

    def give_back(self, identifier: str, path: Path) -> None: ...


@dataclass
class Item:
    """An item of one request. `end` is the first token after its last placeholder, `step` the last that loads it."""

    identifier: str
    rows: int
    end: int = 0
    pixels: bool = True
    path: Path | None = None
    step: int = 0


@dataclass
class Asked:
    """A request that came by. Nothing of it is missing for tokens from `missing_end` on."""

    features: int
    items: dict[str, Item] = field(default_factory=dict)
    missing_end: int = 0
    lost: bool = False


class Holds:
    """Of the scheduler's thread. `check` raises OSError or TensorError for a file that the item cannot use.

    Steps are counted because a scheduled step may run after its request has ended: its files wait for it.
    """

    def __init__(self, source: Source, check: Callable[[Path, str, int], object]) -> None:
        self._source = source
        self._check = check
        self._asked: dict[str, Asked] = {}
        self._current: Asked | None = None
        self._later: list[Item] = []
        self._said: deque[str] = deque(maxlen=1000)
        self.scheduled = 0
        self.done = 0
        #: Requests that cannot get an embedding which they need.
        self.unavailable: set[str] = set()

    def admit(self, request: Any, computed: int) -> bool:
        """Whether the request, its first `computed` tokens done, may be scheduled. `holds` is about it from now on."""
        asked = self._asked.get(request.request_id)
        if asked is None or asked.features != len(request.mm_features):
            asked = self._asked[request.request_id] = self._look(request, asked)
        self._current = asked
        if computed >= asked.missing_end:
            return True
        if not asked.lost:
            self._look_again(request.request_id, asked, computed)
        return not asked.lost

    def holds(self, identifier: str) -> bool:
        """Whether the request that was admitted last has this item's embedding."""
        item = self._current.items.get(identifier) if self._current else None
        return item is not None and item.path is not None

    def loading(self, request_id: str, identifier: str) -> Item | None:
        """The held item, which the step that is being scheduled will load, or None if the request does not hold it."""
        asked = self._asked.get(request_id)
        item = asked.items.get(identifier) if asked else None
        if item is None or item.path is None:
            return None
        item.step = self.scheduled + 1
        return item

    def finish(self, request_id: str) -> None:
        """The request has ended, in whatever way."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return
        if asked is self._current:
            self._current = None
        self._later += asked.items.values()
        self._give_back()

    def step_done(self) -> None:
        """The oldest scheduled step has run."""
        self.done += 1
        if self._later:
            self._give_back()

    def close(self) -> None:
        self.done = self.scheduled + 1
        for request_id in [*self._asked]:
            self.finish(request_id)
        self._give_back()

    def _look(self, request: Any, before: Asked | None) -> Asked:
        asked = Asked(len(request.mm_features), before.items if before else {}, lost=before.lost if before else False)
        for feature in request.mm_features:
            place = feature.mm_position
            item = asked.items.setdefault(feature.identifier, Item(feature.identifier, place.get_num_embeds()))
            item.end = max(item.end, place.offset + place.length)
            item.pixels = item.pixels and has_pixels(feature.data)
        for item in asked.items.values():
            if item.path is None:
                self._take(item)
        _note_missing(asked)
        return asked

    def _look_again(self, request_id: str, asked: Asked, computed: int) -> None:
        """Something that is not computed yet is missing: it may have come meanwhile, or the engine may encode it."""
        for item in asked.items.values():
            if item.path is None and computed < item.end and not self._take(item) and not item.pixels:
                log.warning("request %s: item %r has neither pixels nor an embedding", request_id, item.identifier)
                asked.lost = True
                self.unavailable.add(request_id)
                return
        _note_missing(asked)

    def _take(self, item: Item) -> bool:
        path = self._source.take(item.identifier)
        if path is None:
            return False
        try:
            self._check(path, item.identifier, item.rows)
        except (OSError, TensorError) as error:
            self._source.give_back(item.identifier, path)
            if item.identifier not in self._said:
                self._said.append(item.identifier)
                log.warning("not used: %s", error)
            return False
        item.path = path
        return True

    def _give_back(self) -> None:
        waiting = []
        for item in self._later:
            if item.path is not None and item.step > self.done:
                waiting.append(item)
            elif item.path is not None:
                self._source.give_back(item.identifier, item.path)
        self._later = waiting


def has_pixels(data: Any) -> bool:
    """Whether the encoder can run on vLLM's MultiModalKwargsItem: anything in it is for the device."""
    return data is not None and any(
        not element.field.keep_on_cpu and element.data is not None for element in data.values()
    )


def _note_missing(asked: Asked) -> None:
    asked.missing_end = max((item.end for item in asked.items.values() if item.path is None), default=0)
