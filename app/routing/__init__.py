"""Choosing workers: a `Router` decides, and reserves what `Reservations` give back."""

from app.routing.base import Ask, Decision, Explanation, Router, View, encode_place
from app.routing.reservations import Reservations
from app.routing.router import RedisRouter

__all__ = [
    "Ask",
    "Decision",
    "Explanation",
    "RedisRouter",
    "Reservations",
    "Router",
    "View",
    "encode_place",
]
