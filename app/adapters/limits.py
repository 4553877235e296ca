"""How much of an adapter is read, and for how long."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from app.adapters.base import AdapterTooLarge, AdapterUnreachable

#: Bytes that are read and written at once.
CHUNK = 1 << 20
#: Longest silence of a source.
STALL_S = 30.0


@dataclass(frozen=True)
class Limits:
    """Of one fetch: `max_bytes` for what is read, `end` on the monotonic clock. `stopped` is set when nobody waits any
    more."""

    max_bytes: int
    timeout_s: float
    end: float
    stopped: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, max_mb: float, timeout_s: float) -> Limits:
        return cls(int(max_mb * 1e6), timeout_s, time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        return max(self.end - time.monotonic(), 0.0)

    def check(self) -> None:
        """Raise AdapterUnreachable when the time is over."""
        if self.stopped.is_set() or not self.left_s:
            raise self.too_late()

    def too_late(self) -> AdapterUnreachable:
        return AdapterUnreachable(f"the adapter did not come within adapters.fetch_timeout_s ({self.timeout_s:g} s)")

    def too_large(self) -> AdapterTooLarge:
        return AdapterTooLarge(f"larger than adapters.max_mb allows ({self.max_bytes / 1e6:g} MB)")


class Meter:
    """Counts bytes as they come, whatever a header said of their number."""

    def __init__(self, limits: Limits) -> None:
        self.total = 0
        self._limits = limits

    def add(self, size: int) -> None:
        """Raises AdapterTooLarge or AdapterUnreachable."""
        self._limits.check()
        self.total += size
        if self.total > self._limits.max_bytes:
            raise self._limits.too_large()
