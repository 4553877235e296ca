"""The connector in the engine's scheduler: which embeddings a step loads, and which it saves where."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from workers.embeddings.ec_stats import EcStats
from workers.embeddings.holds import Holds
from workers.embeddings.shelves import Shelf

#: vLLM's modality for embeddings that a client gave in place of text: no encoder has a part in them.
NOT_ENCODED = "prompt_embeds"


@dataclass(frozen=True)
class Load:
    """An embedding to load: of this item, with so many rows, from this file."""

    identifier: str
    rows: int
    path: str


@dataclass
class Step(ECConnectorMetadata):
    """What the workers of one engine step are told. Paths are of reserved files.

    `saves` is of items that the encoder runs on, `cached` of items that the engine may have encoded before.
    """

    loads: list[Load] = field(default_factory=list)
    saves: dict[str, str] = field(default_factory=dict)
    cached: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Encode:
    request_id: str
    identifier: str
    modality: str
    rows: int


class SchedulerSide:
    """For the scheduler's thread. `total_bytes` answers a file's size for (modality, rows), None if it is not known."""

    def __init__(
        self,
        shelf: Shelf,
        check: Callable[[Path, str, int], object],
        total_bytes: Callable[[str, int], int | None],
        *,
        producer: bool,
        consumer: bool,
    ) -> None:
        self._shelf = shelf
        self._holds = Holds(shelf, check)
        self._total_bytes = total_bytes
        self._producer = producer
        self._consumer = consumer
        self._stats = EcStats()
        self._loads: dict[str, Load] = {}
        self._encodes: list[Encode] = []
        self._running: deque[list[Encode]] = deque()

    def admit(self, request: Any, computed: int) -> bool:
        return self._holds.admit(request, computed)

    def has(self, identifier: str) -> bool:
        return self._consumer and self._holds.holds(identifier)

    def allocated(self, request: Any, index: int) -> None:
        """The scheduler made room in the encoder cache: for a load if `has` was true, and otherwise for an encode."""
        feature = request.mm_features[index]
        identifier, rows = feature.identifier, feature.mm_position.get_num_embeds()
        held = self._holds.loading(request.request_id, identifier) if self._consumer else None
        if held is not None:
            self._loads[identifier] = Load(identifier, rows, str(held.path))
        elif feature.modality != NOT_ENCODED:
            self._encodes.append(Encode(request.request_id, identifier, feature.modality, rows))

    def build(self, scheduled: Any) -> Step:
        """The step's metadata, of what was allocated since the last one. `scheduled` is vLLM's SchedulerOutput."""
        self._holds.scheduled += 1
        # A request that was preempted in the pass that scheduled it is not encoded, but what it loads is in the cache.
        encodes = [one for one in self._encodes if one.request_id in scheduled.scheduled_encoder_inputs]
        step = Step(loads=list(self._loads.values()))
        if self._producer:
            for one in encodes:
                path = self._shelf.reserved(one.identifier, self._total_bytes(one.modality, one.rows))
                if path is not None:
                    step.saves[one.identifier] = str(path)
            if self._shelf.reserved_elsewhere:
                step.cached = self._cached(scheduled, step.saves)
        self._stats.add("loaded_items", len(step.loads))
        self._stats.add("encoded_items", len(encodes))
        self._stats.add("encode_steps", int(bool(encodes)))
        self._running.append(encodes)
        self._loads, self._encodes = {}, []
        return step

    def step_done(self) -> set[str]:
        """The oldest step that was built has run. Answers the requests to fail."""
        if self._running:
            encodes = self._running.popleft()
            for one in encodes if self._producer else ():
                # The scheduler learns nothing from the worker of an encode-only engine: the file tells in every case.
                self._stats.add("saved_items" if self._shelf.settle(one.identifier) else "not_saved")
            self._holds.step_done()
        unavailable, self._holds.unavailable = self._holds.unavailable, set()
        self._stats.add("unavailable", len(unavailable))
        return unavailable

    def finished(self, request_id: str) -> None:
        self._holds.finish(request_id)

    def take_stats(self) -> EcStats:
        stats, self._stats = self._stats, EcStats()
        return stats

    def close(self) -> None:
        self._holds.close()
        self._shelf.close()

    def _cached(self, scheduled: Any, saves: dict[str, str]) -> dict[str, str]:
        """Items of new requests that this step does not encode."""
        found = {}
        for request in scheduled.scheduled_new_reqs:
            for feature in request.mm_features:
                path = self._shelf.reserved(feature.identifier, None)
                if path is not None and feature.identifier not in saves:
                    found[feature.identifier] = str(path)
        return found
