"""Adapter to vLLM: the engine's own view of its load, a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

#: Called with KV cache usage (0 to 1), running and waiting requests.
Report = Callable[[float, int, int], None]


class LoadLogger(StatLoggerBase):
    """Hands every step's scheduler statistics on. vLLM's Prometheus logger runs beside it."""

    def __init__(self, report: Report) -> None:
        self._report = report

    @classmethod
    def factory(cls, report: Report) -> Callable[[Any, int], LoadLogger]:
        return lambda _config, _index: cls(report)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._report(
                scheduler_stats.kv_cache_usage, scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            )

    def log_engine_initialized(self) -> None:
        """vLLM calls this once; there is nothing to say."""
