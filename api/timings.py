"""How long a request took in which stage, for clients that ask.

Whole answers have it in a header, streams in a comment before their end, which clients of server-sent events pass over.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from api.job import Job
from app.messages.deltas import Delta
from app.messages.plans import Plan

#: The header that asks, with the value 1, and the one that answers.
HEADER = "x-trivet-timings"
COMMENT = ": trivet-timings "
DONE = "data: [DONE]\n\n"
#: Stages in their order, as `StageTask.measured` and the answer name them.
STAGES = ("queue", "encode", "prefill", "transfer", "decode")

Stream = AsyncGenerator[list[Delta], None]


@dataclass
class Choice:
    """One job of the request. `items` are its different media."""

    items: int
    plan: Plan | None = None
    measured: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0

    @property
    def milliseconds(self) -> float:
        return sum(self.measured.get(stage, 0.0) for stage in STAGES)

    @property
    def encoded(self) -> int:
        """Items that were encoded for this job, by encode workers or with its prompt."""
        return (len(self.plan.encode) if self.plan else 0) + int(self.measured.get("encoded_items", 0))

    def planned(self, plan: Plan) -> None:
        self.plan = plan

    async def follow(self, stream: Stream) -> Stream:
        try:
            async for deltas in stream:
                for delta in deltas:
                    self.cached_tokens += delta.cached_tokens or 0
                    self.measured |= delta.measured or {}
                yield deltas
        finally:
            await stream.aclose()


class Timings:
    """Of one HTTP request, from its arrival on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._choices: list[Choice] = []

    def stream(self, job: Job, open_stream: Callable[[Job], Stream]) -> Stream:
        """The job's deltas, with an eye on them."""
        choice = Choice(len({ref.identity for ref in job.prompt.media}))
        self._choices.append(choice)
        return choice.follow(open_stream(replace(job, on_plan=choice.planned)))

    def text(self) -> str:
        """JSON in one line. Of several choices the durations of the slowest, and all workers and hits."""
        total = (time.monotonic() - self._began) * 1000.0
        slowest = max(self._choices, key=lambda one: one.milliseconds, default=Choice(0))
        stages = {f"{stage}_ms": round(slowest.measured.get(stage, 0.0), 2) for stage in STAGES}
        found: dict[str, Any] = {
            "total_ms": round(total, 2),
            **stages,
            "other_ms": round(max(0.0, total - slowest.milliseconds), 2),
            "workers": self._workers(),
            "cached_tokens": sum(one.cached_tokens for one in self._choices),
            "items": sum(one.items for one in self._choices),
            "embedding_hits": sum(max(0, one.items - one.encoded) for one in self._choices),
        }
        return orjson.dumps(found).decode()

    def _workers(self) -> dict[str, list[str]]:
        plans = [one.plan for one in self._choices if one.plan is not None]
        named = {
            "encode": {one.worker for plan in plans for one in plan.encode.values()},
            "prefill": {plan.prefill.worker for plan in plans},
            "decode": {plan.decode.worker for plan in plans if plan.decode is not None},
        }
        return {role: sorted(workers) for role, workers in named.items()}

    async def told(self, frames: AsyncGenerator[str | bytes, None]) -> AsyncGenerator[str | bytes, None]:
        """The frames, and the comment: before `[DONE]`, after which there must be nothing, or else at the end."""
        done = False
        try:
            async for frame in frames:
                if isinstance(frame, bytes):
                    frame = frame.decode()
                if done := frame.endswith(DONE):
                    frame = frame.removesuffix(DONE) + self._comment() + DONE
                yield frame
        finally:
            await frames.aclose()
        if not done:
            yield self._comment()

    def _comment(self) -> str:
        return f"{COMMENT}{self.text()}\n\n"
