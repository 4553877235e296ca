"""What the scripts are asked, in JSON: the request, its candidates, and how much each thing counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

from app import keys
from app.messages.plans import Assignment
from app.registry import Fleet, WorkerRecord
from app.routing.base import Ask
from app.settings_sections import RoutingSettings

Stage = Literal["whole", "prefill", "decode"]

#: What an embedding counts that nobody has yet: about 250 tokens of a small vision model's.
UNKNOWN_EMBEDDING_BYTES = 4 << 20

WEIGHTS = (
    "overlap_credit",
    "prefill_load_scale",
    "queue_weight",
    "active_request_weight",
    "transfer_weight",
    "embedding_weight",
    "temperature",
    "max_queue",
    "active_decode_blocks_threshold",
    "local_prefill_max_tokens",
    "local_prefill_cached_ratio",
)


class Asking:
    """Writes asks for scripts. `claim_s` is how long an encode worker that was chosen has for an item before others may
    take it on."""

    def __init__(self, settings: RoutingSettings, claim_s: float) -> None:
        self._settings = settings
        weights = {name: getattr(settings, name) for name in WEIGHTS}
        self._common: dict[str, Any] = {
            "weights": weights | {"unknown_embedding_bytes": UNKNOWN_EMBEDDING_BYTES},
            "claim_ms": max(1, int(claim_s * 1000)),
            "predicted_s": settings.predicted_ttl_s if settings.kv_events else settings.ttl_s,
            "max_predicted": settings.max_blocks_per_worker,
            "session_s": settings.session_ttl_s,
            "turns": keys.TURNS,
            "late": keys.PRIORITY_STEPS[-1],
        }

    def first(self, fleet: Fleet, ask: Ask, turn: int, *, dry: bool) -> dict[str, Any]:
        """To choose who prefills, and who encodes."""
        whole, prefill = fleet.aggregated(ask.media), fleet.prefillers(ask.media)
        # Between one task and two those count that would decode.
        decode = fleet.decoders() if whole or dry else []
        stages: list[tuple[Stage, list[WorkerRecord]]] = [("whole", whole), ("prefill", prefill), ("decode", decode)]
        asked = self._request(ask, "first") | {"turn": turn, "dry": dry}
        asked["candidates"] = [one for stage, workers in stages for one in self._candidates(stage, workers, ask)]
        asked["encoders"] = [_encoder(one.assignment) for one in fleet.encoders(ask.fingerprint)] if ask.media else []
        asked["items"] = [
            {
                "identity": identity,
                "held": keys.embedding(ask.fingerprint, identity),
                "claim": keys.encoding(ask.fingerprint, identity),
            }
            for identity in ask.items
        ]
        return asked

    def second(self, fleet: Fleet, ask: Ask) -> dict[str, Any]:
        """To choose who decodes."""
        candidates = [
            one | {"record": keys.worker(one["worker"])} for one in self._candidates("decode", fleet.decoders(), ask)
        ]
        cancelled = keys.cancelled(ask.request_id)
        return self._request(ask, "decode") | {"candidates": candidates, "items": [], "cancelled": cancelled}

    def _request(self, ask: Ask, kind: str) -> dict[str, Any]:
        expected = self._settings.expected_output_tokens
        return self._common | {
            "request": ask.request_id,
            "owner": ask.owner,
            "kind": kind,
            "seed": random.getrandbits(31),
            "tokens": ask.view.tokens,
            "answer_tokens": min(ask.max_tokens, expected) if ask.max_tokens else expected,
            "tenant": ask.tenant,
            "priority": ask.priority,
            "session": keys.session(ask.tenant, ask.session) if ask.session else False,
        }

    def _candidates(self, stage: Stage, workers: list[WorkerRecord], ask: Ask) -> Iterator[dict[str, Any]]:
        for one in workers:
            adapter_cost = self._settings.adapter_weight * _adapters_to_move(one, ask.adapter)
            block_size = max(1, one.engine.block_size)
            for rank in range(one.engine.data_parallel_size):
                yield {
                    "stage": stage,
                    "worker": one.id,
                    "incarnation": one.incarnation,
                    "rank": rank,
                    "load": keys.load(one.id, one.incarnation, rank),
                    "kv": self._settings.kv_events and keys.kv(one.id, rank),
                    "predicted_prefix": keys.predicted(one.id, one.incarnation, rank, ""),
                    "adapter_cost": adapter_cost,
                    "block_size": block_size,
                    "kv_capacity": one.engine.kv_tokens // block_size,
                    "concurrency": max(1, one.concurrency // one.engine.data_parallel_size),
                }


def _adapters_to_move(worker: WorkerRecord, adapter: str) -> float:
    """What it takes until the request's adapter is on the worker's device: to bring it, and by the share of places
    there that are taken, to send another one away, which its own requests then need again."""
    engine = worker.engine
    if not adapter or adapter in engine.resident_loras:
        return 0.0
    return 1.0 + len(engine.resident_loras) / max(1, engine.max_loras)


def _encoder(one: Assignment) -> dict[str, Any]:
    return one.model_dump() | {"load": keys.load(one.worker, one.incarnation)}
