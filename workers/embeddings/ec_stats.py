"""Adapter to vLLM: what the connector counts, on its way into the engine's statistics and Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

#: Name in `SchedulerStats.ec_connector_stats` -> meaning. A Prometheus counter `trivet:ec_<name>_total` for each.
MEANINGS = {
    "encoded_items": "Items that the engine's encoder ran on.",
    "encode_steps": "Engine steps in which the encoder ran: items per step is the encoder's batch.",
    "loaded_items": "Items whose embedding was loaded instead of encoded.",
    "saved_items": "Encoded items whose embedding was written to the embedding store.",
    "not_saved": "Encoded items whose embedding was not stored, most often because no room was reserved.",
    "unavailable": "Requests that failed because an item without pixels had no embedding.",
}
PREFIX = "trivet:ec_"


class EcStats(ECConnectorStats):
    """Counts since the last time they were taken: `data` has all names of MEANINGS, each an int."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={name: int((data or {}).get(name, 0)) for name in MEANINGS})

    def add(self, name: str, count: int = 1) -> None:
        self.data[name] += count

    def reset(self) -> None:
        self.data = dict.fromkeys(MEANINGS, 0)

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        return EcStats({name: self.data[name] + other.data.get(name, 0) for name in MEANINGS})

    def reduce(self) -> dict[str, int | float]:
        return {name: count for name, count in self.data.items() if count}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class EcPrometheus(ECConnectorPromMetrics):
    """One counter per name and engine, beside vLLM's own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier()
        self._counters = {}
        for name, meaning in MEANINGS.items():
            counter = metric_types[Counter](name=PREFIX + name, documentation=meaning, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name in MEANINGS:
            self._counters[engine_idx, name].inc(transfer_stats_data.get(name, 0))


def _forget_earlier() -> None:
    """A second engine in one process registers them again; vLLM does the same with its own."""
    for collector in [*REGISTRY._collector_to_names]:
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)
