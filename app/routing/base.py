"""What the API asks of a router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.messages import Plan
from app.registry import Fleet


@dataclass(frozen=True)
class Ask:
    """A request to place. `deadline` (unix seconds) ends its reservation if nobody else does.

    `items` are the identities of its media, each once; `fingerprint` is that of the model they were named for.
    """

    request_id: str
    deadline: float
    items: tuple[str, ...] = ()
    fingerprint: str = ""

    @property
    def media(self) -> bool:
        return bool(self.items)


class Router(Protocol):
    async def plan(self, fleet: Fleet, ask: Ask) -> Plan:
        """Choose workers and reserve their load. Raises NoWorker, at once, when a role is missing."""

    async def release(self, plan: Plan, request_id: str) -> None:
        """Give the reservations back; harmless when given back already."""


def encode_place(request_id: str, identity: str) -> str:
    """The name of an encode task's reservation: a request has one for each of its items."""
    return f"{request_id}/{identity}"
