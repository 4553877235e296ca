"""OpenAI's `service_tier` in streams, which vLLM's chunks have no field for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

#: What a client may ask for; there is one tier here, and it serves them all.
TIERS = frozenset({"auto", "default", "flex", "scale", "priority", "fast"})
_HEAD = 'data: {"id":'


def asked(request: Any) -> str | None:
    """The tier to name in the answer to vLLM's request, if it asked for one."""
    tier = (request.model_extra or {}).get("service_tier")
    if not isinstance(tier, str) or tier not in TIERS:
        return None
    return "default" if tier == "auto" else tier


def tiered(frames: AsyncGenerator[Any, None], request: Any) -> AsyncGenerator[Any, None]:
    """The frames, every chunk with the tier if one was asked for."""
    tier = asked(request)
    return frames if tier is None else _with_tier(frames, f'data: {{"service_tier":"{tier}","id":')


async def _with_tier(frames: AsyncGenerator[Any, None], head: str) -> AsyncGenerator[Any, None]:
    """No text of a model's can look like the start of a chunk: JSON escapes its quotes."""
    try:
        async for frame in frames:
            if isinstance(frame, str):
                yield frame.replace(_HEAD, head)
            else:
                yield frame.replace(_HEAD.encode(), head.encode())
    finally:
        await frames.aclose()
