"""Headers about where a request goes: what a client may ask for, and what it may be told."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from fastapi import Request

from app.errors.requests import InvalidRequest
from app.routing import Decision
from app.settings_sections import ApiSettings

#: Requests of one talk; policy `sticky` sends them to one worker.
SESSION = "x-session-id"
#: Lower is earlier, as in vLLM; a body's `priority` wins.
PRIORITY = "x-priority"
#: With any value, and `api.explain_routing`, the answer has the reasons in `x-route`.
EXPLAIN = "x-explain-route"
ROUTE = "x-route"

LONGEST_SESSION = 256
MOST_PRIORITY = 100
#: Candidates in the header, the cheapest first: proxies bound the size of headers.
MOST_CANDIDATES = 8


def session(request: Request) -> str:
    """Raises InvalidRequest."""
    given = request.headers.get(SESSION, "")
    if len(given) > LONGEST_SESSION or not given.isprintable() or not given.isascii():
        raise InvalidRequest(f"{SESSION} has at most {LONGEST_SESSION} printable ASCII characters", param=SESSION)
    return given


def priority(request: Request) -> int:
    """Raises InvalidRequest."""
    given = request.headers.get(PRIORITY, "0")
    try:
        value = int(given)
    except ValueError:
        value = MOST_PRIORITY + 1
    if abs(value) > MOST_PRIORITY:
        raise InvalidRequest(f"{PRIORITY} is a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}", param=PRIORITY)
    return value


def explained(settings: ApiSettings, request: Request, decisions: Sequence[Decision]) -> dict[str, str]:
    """The header with the reasons for the last decision, if it was asked for and may be told."""
    if not (settings.explain_routing and decisions and request.headers.get(EXPLAIN)):
        return {}
    reasons = decisions[-1].reasons
    cheapest = sorted(reasons.candidates, key=lambda one: (not one.chosen, one.cost or 0.0))[:MOST_CANDIDATES]
    shown = reasons.model_copy(update={"candidates": cheapest})
    return {ROUTE: orjson.dumps(shown.model_dump(exclude_defaults=True)).decode()}
