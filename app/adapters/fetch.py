"""From a source to a verified local folder."""

from __future__ import annotations

from collections.abc import Collection

from app.adapters.base import Adapter
from app.settings_adapters import AdapterSettings


async def fetch(
    name: str,
    source: str,
    settings: AdapterSettings,
    *,
    max_rank: int,
    known_modules: Collection[str] | None = None,
    version: str | None = None,
) -> Adapter:
    raise NotImplementedError


def release(adapter: Adapter) -> None:
    raise NotImplementedError
