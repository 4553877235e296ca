"""Responses that are kept in Redis, so that any API process can continue a conversation."""

from api.stored.background import Background
from api.stored.store import ResponseStore, Stored

__all__ = ["Background", "ResponseStore", "Stored"]
