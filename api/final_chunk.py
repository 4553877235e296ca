"""The last chunk of a streamed tool call, as OpenAI sends it: with nothing but the finish reason."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson


async def alone(frames: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """vLLM's frames, where no chunk has a part of a tool call and a finish reason.

    vLLM puts both into one, which may be a call's only chunk when its tokens came at once. OpenAI's client looks at the
    finish reason first: such a call never ends for it.
    """
    try:
        async for frame in frames:
            for part in _apart(frame):
                yield part
    finally:
        await frames.aclose()


def _apart(frame: str) -> tuple[str, ...]:
    # No text of a model's can look like these: JSON escapes its quotes.
    if '"tool_calls":[' not in frame or '"finish_reason":"' not in frame:
        return (frame,)
    chunk: dict[str, Any] = orjson.loads(frame.removeprefix("data: "))
    ends = [
        _end(choice) for choice in chunk["choices"] if choice["finish_reason"] and choice["delta"].get("tool_calls")
    ]
    if not ends:  # one choice ends while another one calls
        return (frame,)
    return _frame(chunk), _frame({**chunk, "choices": ends})


def _end(choice: dict[str, Any]) -> dict[str, Any]:
    """Takes the end out of a choice, and gives it as a choice of its own."""
    end = {"index": choice["index"], "delta": {}, "logprobs": None}
    for name in ("finish_reason", "stop_reason"):
        end[name], choice[name] = choice.get(name), None
    return end


def _frame(chunk: dict[str, Any]) -> str:
    return f"data: {orjson.dumps(chunk).decode()}\n\n"
