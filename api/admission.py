"""Letting a request in: the limit on what is in flight, its count, its clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from api import metrics
from app.errors.requests import TooManyRequests

if TYPE_CHECKING:
    from api.services import Services


class Ticket:
    """A request being served, from its arrival until the last byte of its answer has been made."""

    def __init__(self, services: Services) -> None:
        """Raises TooManyRequests when the API process serves as many as `api.max_in_flight` allows."""
        limit = services.settings.api.max_in_flight
        if services.in_flight >= limit:
            metrics.REQUESTS.labels(TooManyRequests.code).inc()
            raise TooManyRequests(f"{limit} requests in flight, as many as api.max_in_flight allows")
        self._services = services
        self._started = time.monotonic()
        self._open = True
        services.in_flight += 1
        metrics.IN_FLIGHT.inc()

    def first_frame(self) -> None:
        metrics.FIRST_FRAME.observe(time.monotonic() - self._started)

    def close(self, outcome: str) -> None:
        """`outcome` is `ok`, `cancelled`, or an error's code. Later calls change nothing."""
        if not self._open:
            return
        self._open = False
        self._services.in_flight -= 1
        metrics.IN_FLIGHT.dec()
        metrics.DURATION.observe(time.monotonic() - self._started)
        metrics.REQUESTS.labels(outcome).inc()
