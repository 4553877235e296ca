"""How an answer through the pipeline may differ from that of vLLM's own server: all of it, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

_MADE = "made anew for each answer, choice, output item and tool call"
_TIME = "the time of the answer"
_CACHE = "what a prefix cache had and has depends on what was asked before; the other server runs without one"

#: Fields whose values may differ, by the end of their path. They must be there in both.
VALUES = {
    ".id": _MADE,
    ".item_id": _MADE,
    ".call_id": _MADE,
    ".created": _TIME,
    ".created_at": _TIME,
    ".completed_at": _TIME,
    ".system_fingerprint": "a digest of vLLM's configuration; an API process has no engine in its own",
    ".cached_tokens": _CACHE,
    ".created_cache_tokens": _CACHE,
    ".cache_write_tokens": _CACHE,
    ".cache_read_input_tokens": _CACHE,
    ".cache_creation_input_tokens": _CACHE,
}
#: Fields that only one of the two may have.
PRESENCE = {
    ".input_tokens_details.multimodal_tokens": "the tokens of media are in our responses as in chat; vLLM's lack them",
}
#: Of log-probabilities. Batches of other sizes add up in another order, and `pd` computes a prompt's last token apart.
TOLERANCE = 1e-3


def found(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Where two answers differ and must not, each with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        yield from _of_objects(_with_all_input(ours), _with_all_input(theirs), at)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from found(*pair, f"{at}[{index}]")
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, abs_tol=TOLERANCE):
            yield f"{at}: {ours} and {theirs}"
    elif ours != theirs or type(ours) is not type(theirs):
        yield f"{at}: {ours!r} and {theirs!r}"


def _of_objects(ours: dict[str, Any], theirs: dict[str, Any], at: str) -> Iterator[str]:
    for name in sorted(ours.keys() | theirs.keys()):
        path = f"{at}.{name}"
        if (name in ours) != (name in theirs):
            if not path.endswith(tuple(PRESENCE)):
                yield f"{path}: only {'ours' if name in ours else 'theirs'}"
        elif not path.endswith(tuple(VALUES)):
            yield from found(ours[name], theirs[name], path)


def _with_all_input(usage: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's `input_tokens` are those that no cache has: only with the others they are those of the prompt."""
    if "cache_read_input_tokens" not in usage:
        return usage
    return {**usage, "input_tokens": sum(tokens for name, tokens in usage.items() if "input" in name)}
