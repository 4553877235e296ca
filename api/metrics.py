"""Prometheus metrics of the API: of this process, or of all that share the folder PROMETHEUS_MULTIPROC_DIR.

The variable is prometheus_client's: with it, values lie in files there, one for each process and kind of metric.
"""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from app.routing import Explanation

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "trivet_requests", "Requests by outcome: ok, cancelled, or the error's code.", ["outcome"], registry=REGISTRY
)
IN_FLIGHT = Gauge("trivet_requests_in_flight", "Requests being served.", registry=REGISTRY, multiprocess_mode="livesum")
FIRST_FRAME = Histogram(
    "trivet_time_to_first_frame_seconds",
    "From the request's arrival to the first event of its stream.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
DURATION = Histogram(
    "trivet_request_seconds",
    "From the request's arrival to its end.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
    registry=REGISTRY,
)
WORKERS = Gauge(
    "trivet_workers", "Live workers by role.", ["role"], registry=REGISTRY, multiprocess_mode="livemostrecent"
)
TOKEN_GAPS = Gauge(
    "trivet_token_gaps",
    "Gaps in the token stream that were refilled or ended a request.",
    registry=REGISTRY,
    multiprocess_mode="sum",
)
MEDIA_URLS = Gauge(
    "trivet_media_urls",
    "Media asked of a URL: fetched, not_modified, or the error's code.",
    ["outcome"],
    registry=REGISTRY,
    multiprocess_mode="sum",
)
MEDIA_MEMORY_LOST = Gauge(
    "trivet_media_memory_lost",
    "Where a URL's medium, or the bytes of a known one, were not asked of Redis, which did not answer.",
    ["what"],
    registry=REGISTRY,
    multiprocess_mode="sum",
)
ROUTED = Counter(
    "trivet_routed",
    "Requests placed, by the policy that decided, and why that was not the one of the settings.",
    ["policy", "fallback"],
    registry=REGISTRY,
)
PROMPT_BLOCKS = Counter("trivet_routed_prompt_blocks", "KV blocks of the prompts that were placed.", registry=REGISTRY)
OVERLAP_BLOCKS = Counter(
    "trivet_routed_overlap_blocks", "Those of them that the chosen workers were thought to hold.", registry=REGISTRY
)


def routed(reasons: Explanation) -> None:
    """Count a decision."""
    ROUTED.labels(reasons.policy, reasons.fallback).inc()
    PROMPT_BLOCKS.inc(reasons.blocks)
    OVERLAP_BLOCKS.inc(max(reasons.chosen.held, reasons.chosen.predicted))


GRAMMARS = Counter(
    "trivet_grammars",
    "Schemas and grammars of requests: compiled, known, refused, too_slow or too_large.",
    ["outcome"],
    registry=REGISTRY,
)
LISTED_ALONE = Counter(
    "trivet_listed_without_adapters",
    "Lists of models that lack the adapters, since Redis did not answer.",
    registry=REGISTRY,
)

STORED = Counter(
    "trivet_responses_stored",
    "Responses that were to be stored: stored, too_large, or the code of the error that prevented it.",
    ["outcome"],
    registry=REGISTRY,
)


def render() -> bytes:
    if FOLDER not in os.environ:
        return generate_latest(REGISTRY)
    _forget_the_dead()
    shared = CollectorRegistry()
    multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
    return generate_latest(shared)


def _forget_the_dead() -> None:
    """What a process that was killed had in flight, is no more. Its counts stay."""
    for path in Path(os.environ[FOLDER]).glob("gauge_live*_*.db"):
        pid = int(path.stem.rpartition("_")[2])
        if not Path(f"/proc/{pid}").exists():
            multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]
