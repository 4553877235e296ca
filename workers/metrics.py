"""Prometheus metrics of this process, the engine's and the stages', on a port of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app import ports

if TYPE_CHECKING:
    from workers.items.service import ItemService
    from workers.kv_events.service import KVEvents

HANDED_OFF = Counter(
    "trivet_handed_off",
    "Requests handed to a decode worker, by the policy that decided, and why that was not the one of the settings.",
    ["policy", "fallback"],
)
ADAPTERS = Counter("trivet_adapters", "What became of adapters in this worker.", ["event"])
for _event in ("loaded", "failed", "let_go", "missing"):
    ADAPTERS.labels(_event)  # there from the start, at 0
ADAPTERS_HELD = Gauge("trivet_adapters_held", "Adapters that the engine holds.")


def serve(host: str) -> str:
    """Start serving and answer the URL; it is also in the worker's registry record."""
    port = ports.reserve(host)
    start_http_server(port, addr=host, registry=REGISTRY)
    return f"http://{host}:{port}/metrics"


class ItemMetrics(Collector):
    """What became of items, read from the counters of the parts that handle them whenever somebody asks."""

    def __init__(self, items: ItemService) -> None:
        self._items = items

    def collect(self) -> Iterator[Any]:
        items = self._items
        yield _counter("trivet_items", "Items of prompts, by how they were come by", _fields(items.finder.counts))
        yield _counter("trivet_item_fetches", "Embeddings read from other workers", _fields(items.local.counts))
        yield _counter("trivet_prompts_whole", "Prompts with media that vLLM rendered whole", _whole(items))
        yield _counter("trivet_embedding_cache", "Events of the embedding cache", _fields(items.local.store.counts))
        yield _counter("trivet_tensor_plane", "Buffers of other processes, by how they were read", _plane(items))
        failures = dict(items.plane.counts.failures)
        yield _counter("trivet_tensor_plane_failures", "Buffers that could not be read, by error code", failures)
        size = GaugeMetricFamily("trivet_embedding_cache_bytes", "Embeddings in the cache, in bytes")
        size.add_metric([], items.local.store.size)
        yield size


class KVEventMetrics(Collector):
    """What became of the engine's KV events, and how many blocks routers are told of, by data-parallel rank."""

    def __init__(self, kv: KVEvents) -> None:
        self._kv = kv

    def collect(self) -> Iterator[Any]:
        yield _counter("trivet_kv_events", "KV cache events of the engine, and what became of them", self._kv.counts())
        blocks = GaugeMetricFamily("trivet_kv_blocks", "KV blocks that routers are told of", labels=["rank"])
        for rank, one in self._kv.ranks.items():
            blocks.add_metric([str(rank)], len(one.held))
        yield blocks


def _counter(name: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["event"])
    for event, value in values.items():
        family.add_metric([event], value)
    return family


def _fields(counts: Any) -> dict[str, float]:
    return {field.name: getattr(counts, field.name) for field in dataclasses.fields(counts)}


def _whole(items: ItemService) -> dict[str, float]:
    return {"rendered": items.prompts.rendered_whole}


def _plane(items: ItemService) -> dict[str, float]:
    return {name: value for name, value in _fields(items.plane.counts).items() if isinstance(value, int)}
