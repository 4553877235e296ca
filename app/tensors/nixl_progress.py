"""Adapter to NIXL: its progress thread must not spin.

NIXL's Python API fixes the thread's delay at 0, and so every agent burns a core, idle or not; with two engines on a
two-core host nothing is left to compute with. With a delay the thread sleeps until there is something to do: measured
0.02 of a core. vLLM makes its agent inside the engine's process, so this comes in as one of vLLM's general plugins
(see pyproject.toml); the tensor plane calls it for its own.
"""

from __future__ import annotations

import os
from typing import Any

#: Set by workers whose engine transfers KV blocks: the delay in microseconds.
VARIABLE = "_TRIVET_NIXL_PROGRESS_DELAY_US"


def install() -> None:
    """Give every NIXL agent that this process makes the delay that the variable names; without it, change nothing."""
    delay = os.environ.get(VARIABLE)
    if delay is not None:
        apply(int(delay))


def apply(microseconds: int) -> None:
    """Give every NIXL agent that this process makes from now on this delay; the first call decides."""
    # vLLM sets this just before it imports NIXL, and only warns when somebody was faster.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl import _api

    _delay(_api.nixlBind, microseconds)


def _delay(bindings: Any, microseconds: int) -> None:
    make = bindings.nixlAgent
    if getattr(make, "delayed", False):
        return

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = microseconds
        return make(name, config)

    agent.delayed = True  # type: ignore[attr-defined]
    bindings.nixlAgent = agent
