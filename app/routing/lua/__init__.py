"""The scripts that run in Redis, each put together from files of one idea.

A policy is one function, `pick`; those that go by cost look at KV blocks and embeddings first, and the others do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from app.scripts import Script
from app.settings_sections import Policy

#: Policies that go by cost.
BY_COST = frozenset({"kv", "sticky"})
FOLDER = Path(__file__).parent


def _script(*names: str) -> Script:
    return Script(*(FOLDER / f"{name}.lua" for name in names))


def _deciding(policy: Policy, *names: str) -> Script:
    appraisal = ("overlap", "cost", "path", "cheapest") if policy in BY_COST else ("plain", "path")
    return _script("ask", "places", "step", *appraisal, "candidates", f"policy_{policy}", *names)


PLACE = {policy: _deciding(policy, "encode", "place") for policy in get_args(Policy)}
HAND_OFF = {policy: _deciding(policy, "hand_off") for policy in get_args(Policy)}
RELEASE, PREFILLED, REAP = (_script("places", name) for name in ("release", "prefilled", "reap"))
