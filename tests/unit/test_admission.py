"""api.admission."""

from types import SimpleNamespace
from typing import Any

import pytest

from api import metrics
from api.admission import Ticket
from app.errors.requests import TooManyRequests
from app.settings import Settings
from app.settings_sections import ApiSettings


def services(limit: int) -> Any:
    return SimpleNamespace(settings=Settings(api=ApiSettings(max_in_flight=limit)), in_flight=0)


def sample(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


def test_one_more_than_allowed_is_refused_until_one_ends() -> None:
    held = services(2)
    first, _ = Ticket(held), Ticket(held)
    before = sample("trivet_requests_total", outcome="rate_limit_exceeded")
    with pytest.raises(TooManyRequests, match=r"2 requests in flight.*api\.max_in_flight") as caught:
        Ticket(held)
    assert caught.value.failure().retry_after_s == 1
    assert sample("trivet_requests_total", outcome="rate_limit_exceeded") == before + 1
    assert held.in_flight == 2, "the refused one is not in flight"
    first.close("ok")
    Ticket(held)


def test_a_ticket_is_closed_once() -> None:
    held = services(5)
    ticket = Ticket(held)
    ok, cancelled = sample("trivet_requests_total", outcome="ok"), sample("trivet_requests_total", outcome="cancelled")
    flying, ended = sample("trivet_requests_in_flight"), sample("trivet_request_seconds_count")
    ticket.first_frame()
    ticket.close("ok")
    ticket.close("cancelled")
    assert held.in_flight == 0
    assert sample("trivet_requests_total", outcome="ok") == ok + 1
    assert sample("trivet_requests_total", outcome="cancelled") == cancelled
    assert sample("trivet_requests_in_flight") == flying - 1
    assert sample("trivet_request_seconds_count") == ended + 1
