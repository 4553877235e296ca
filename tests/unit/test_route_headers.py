"""api.route_headers: what a client may say of its request's way, and what it is told."""

import json
from typing import Any

import pytest
from fastapi import Request

from api import route_headers
from app.errors.requests import InvalidRequest
from app.messages.plans import Plan
from app.routing import Decision, Explanation
from app.routing.base import Candidate
from app.settings_sections import ApiSettings
from tests.messages import AGG

OPEN = ApiSettings(explain_routing=True)


def request(**headers: str) -> Request:
    return Request(
        {"type": "http", "headers": [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()]}
    )


def decision(candidates: int = 2) -> Decision:
    made: list[dict[str, Any]] = [
        {"stage": "whole", "worker": f"agg@{at}", "incarnation": "i", "rank": 0, "cost": float(candidates - at)}
        for at in range(candidates)
    ]
    made[0]["chosen"] = True
    reasons = Explanation(policy="kv", blocks=3, candidates=[Candidate(**one) for one in made])
    return Decision(Plan(prefill=AGG, decode=AGG), reasons)


def test_nothing_said_is_nothing_asked() -> None:
    assert (route_headers.session(request()), route_headers.priority(request())) == ("", 0)


def test_what_is_said_is_taken() -> None:
    asked = request(x_session_id="talk 7", x_priority="-3")
    assert (route_headers.session(asked), route_headers.priority(asked)) == ("talk 7", -3)


@pytest.mark.parametrize("given", ["x" * 257, "tab\there", "\x7f"])
def test_a_session_has_a_bounded_readable_name(given: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        route_headers.session(request(x_session_id=given))
    assert refused.value.param == "x-session-id"


@pytest.mark.parametrize("given", ["101", "-101", "1.5", "high", "", "9" * 5000])
def test_a_priority_is_a_small_whole_number(given: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        route_headers.priority(request(x_priority=given))
    assert refused.value.param == "x-priority"


def test_reasons_are_told_who_asks_where_it_is_allowed() -> None:
    (name, told), *_ = route_headers.explained(OPEN, request(x_explain_route="1"), [decision()]).items()
    assert name == "x-route"
    assert [one["worker"] for one in json.loads(told)["candidates"]] == ["agg@0", "agg@1"]
    for settings, asked, decisions in (
        (ApiSettings(), request(x_explain_route="1"), [decision()]),
        (OPEN, request(), [decision()]),
        (OPEN, request(x_explain_route="1"), []),
    ):
        assert route_headers.explained(settings, asked, decisions) == {}


def test_a_header_stays_small_in_a_large_fleet() -> None:
    (told,) = route_headers.explained(OPEN, request(x_explain_route="1"), [decision(100)]).values()
    assert len(told) < 4096
    assert [one["worker"] for one in json.loads(told)["candidates"]] == [
        "agg@0",
        *(f"agg@{at}" for at in range(99, 92, -1)),
    ]
