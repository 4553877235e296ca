"""Logging of the processes that are not Celery's: one line an event, on stderr."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(level: str) -> None:
    logging.basicConfig(level=level, format=FORMAT)
    # One line a request is the access log's business, not the HTTP client's.
    logging.getLogger("httpx").setLevel(logging.WARNING)
