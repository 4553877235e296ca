"""What the stages measure of a request that asks for its timings."""

from __future__ import annotations

import time
from typing import Any

from app.messages.tasks import StageTask
from workers.items.ready import Ready


class Watch:
    """Milliseconds by name, added to what earlier stages measured: see `StageTask.measured`.

    Every duration is taken on one host, by its own clock.
    """

    def __init__(self, task: StageTask) -> None:
        self.measured: dict[str, float] = dict(task.measured)
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """What has passed since the last one."""
        now = time.monotonic()
        self.add(name, now - self._last)
        self._last = now

    def prepared(self, ready: Ready) -> None:
        """The prompt is ready: its items were waited for, brought here, or read to be encoded with it."""
        self.lap("encode" if ready.prompt.items else "queue")
        if ready.encoded_items:
            self.measured["encoded_items"] = ready.encoded_items

    def add(self, name: str, seconds: float) -> None:
        self.measured[name] = self.measured.get(name, 0.0) + seconds * 1000.0

    def engine(self, stats: Any, *, pulled: bool) -> None:
        """By vLLM's own clock (its RequestStateStats). An engine that pulls blocks waits for their transfer."""
        if stats is None or not stats.scheduled_ts:
            return
        self.add("transfer" if pulled else "queue", stats.scheduled_ts - stats.queued_ts)
        if pulled:
            self.add("decode", stats.last_token_ts - stats.scheduled_ts)
        else:
            self.add("prefill", stats.first_token_ts - stats.scheduled_ts)
            self.add("decode", stats.last_token_ts - stats.first_token_ts)
