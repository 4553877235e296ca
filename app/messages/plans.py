"""Which workers run a request."""

from __future__ import annotations

from pydantic import Field

from app.messages.base import Message


class Assignment(Message):
    """A worker chosen for a stage. `incarnation` tells a restarted worker from the one that was chosen."""

    worker: str
    incarnation: str


class Plan(Message):
    """Who runs each stage. Equal assignments are one task: a stage whose worker is the next one's too is no task.

    Without `decode`, the worker that prefills has it chosen when it hands over. Ranks are those of the engines' data
    parallelism. `encode` has an encode worker for each item (by identity) that nobody holds or encodes yet; items that
    are not in it are taken from a holder, waited for, or encoded by the worker that prefills.
    """

    prefill: Assignment
    decode: Assignment | None = None
    prefill_rank: int = Field(0, ge=0)
    decode_rank: int = Field(0, ge=0)
    encode: dict[str, Assignment] = {}

    @property
    def aggregated(self) -> bool:
        return self.prefill == self.decode

    @property
    def workers(self) -> tuple[Assignment, ...]:
        """Those of prefill and decode that are chosen by now."""
        if self.decode is None or self.aggregated:
            return (self.prefill,)
        return (self.prefill, self.decode)
