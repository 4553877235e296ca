"""What the API asks of a router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.messages import Plan
from app.registry import Fleet


@dataclass(frozen=True)
class Ask:
    """A request to place. `deadline` (unix seconds) ends its reservation if nobody else does."""

    request_id: str
    deadline: float
    media: bool


class Router(Protocol):
    async def plan(self, fleet: Fleet, ask: Ask) -> Plan:
        """Choose workers and reserve their load. Raises NoWorker, at once, when a role is missing."""

    async def release(self, plan: Plan, request_id: str) -> None:
        """Give the reservations back; harmless when given back already."""
