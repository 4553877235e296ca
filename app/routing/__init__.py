"""Choosing workers: `Router` is what the API asks, one module for each way to answer."""

from app.routing.base import Ask, Router, encode_place
from app.routing.least_loaded import LeastLoaded

__all__ = ["Ask", "LeastLoaded", "Router", "encode_place"]
