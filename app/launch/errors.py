"""What keeps `trivet up` and `trivet down` from doing as they were told."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """Cannot start, or cannot stop. The message says why and what to do about it."""


class StartFailed(LaunchError):
    """A component did not become ready. `component` names it; empty when it is the whole that did not."""

    def __init__(self, component: str, reason: str) -> None:
        super().__init__(f"{component}: {reason}" if component else reason)
        self.component = component
        self.reason = reason
