"""Adapter to vLLM: the engine's own view of its load, a step at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


@dataclass
class Load:
    """`kv_usage` is 0 to 1."""

    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0

    def logger(self, _config: Any, _engine: int) -> LoadLogger:
        """What vLLM makes for each engine."""
        return LoadLogger(self)


class LoadLogger(StatLoggerBase):
    """Takes every step's scheduler statistics down. vLLM's Prometheus logger runs beside it."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is None:
            return
        load = self._load
        load.kv_usage = scheduler_stats.kv_cache_usage
        load.running = scheduler_stats.num_running_reqs
        load.waiting = scheduler_stats.num_waiting_reqs

    def log_engine_initialized(self) -> None:
        """vLLM calls this once; there is nothing to say."""
