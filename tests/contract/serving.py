"""vLLM's serving layer over a pipeline that has the answers already: no Redis, no workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from api import context
from api.context import RequestContext
from app.errors import TrivetError
from app.messages import Delta


class Pipeline:
    """Answers every job with the same deltas; the real one needs Redis and workers."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.deltas: list[list[Delta]] = []
        self.error: TrivetError | None = None

    async def stream(self, job: Any) -> AsyncGenerator[list[Delta], None]:
        self.jobs.append(job)
        for deltas in self.deltas:
            yield deltas
        if self.error is not None:
            raise self.error


def step(seq: int, text: str, tokens: list[int], **more: Any) -> Delta:
    return Delta(request="r", seq=seq, text=text, token_ids=tokens, **more)


async def frames(serving: Any, **body: Any) -> list[str]:
    context.enter(RequestContext("test", 2e9))
    request = serving.chat_request({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}, "test")
    answer = await serving.chat(request)
    return [frame if isinstance(frame, str) else frame.decode() for frame in [frame async for frame in answer]]
