"""What a request may tell the model's processor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from app.errors.requests import InvalidRequest

FIELD = "mm_processor_kwargs"
#: Longest `mm_processor_kwargs`, as JSON: they travel with every medium.
MAX_LENGTH = 2000
#: Deepest nesting: vLLM, and whatever copies or names the settings, goes through them by recursion.
MAX_DEPTH = 8


def taken(body: dict[str, Any], *, trusted: bool) -> dict[str, Any] | None:
    """The body's `mm_processor_kwargs`, which are no longer in it then. Raises InvalidRequest."""
    given = body.pop(FIELD, None)
    if not given:
        return None
    if not trusted:
        raise _refused("are taken from clients only if media.trust_mm_processor_kwargs is on")
    if not isinstance(given, dict):
        raise _refused("are an object")
    _check(given)
    if len(json.dumps(given)) > MAX_LENGTH:
        raise _too_long()
    return given


def _check(given: dict[str, Any]) -> None:
    """Level by level, and no further than their JSON may be long: a body can hold 60 MB of them."""
    level: list[Any] = [given]
    seen = 0
    for depth in range(MAX_DEPTH + 1):
        if depth == MAX_DEPTH and any(isinstance(one, dict | list) for one in level):
            raise _refused(f"are nested {MAX_DEPTH} deep at most")
        for one in level:
            seen += _least(one)
            if seen > MAX_LENGTH:
                raise _too_long()
            if isinstance(one, dict) and one.get("use_audio_in_video"):
                raise _refused("cannot take the audio out of a video here; send it as a part of its own")
        level = [inner for one in level for inner in _inside(one)]


def _least(one: Any) -> int:
    """Characters that it takes as JSON at least, but for what is inside of it."""
    if isinstance(one, dict) and len(one) <= MAX_LENGTH:
        return len(one) + sum(map(len, one))
    return len(one) if isinstance(one, dict | list | str) else 1


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return one.values()
    return one if isinstance(one, list) else ()


def _too_long() -> InvalidRequest:
    return _refused(f"are {MAX_LENGTH} characters at most")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD} {why}", param=FIELD)
