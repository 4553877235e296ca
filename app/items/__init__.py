"""Item records, and how they put items into a prompt without their media."""

from app.items.record import ItemRecord
from app.items.splice import splice

__all__ = ["ItemRecord", "splice"]
