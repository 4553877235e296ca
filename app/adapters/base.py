"""What an adapter is, and what can be wrong with one."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors.adapters import AdapterRefused
from app.errors.base import TrivetError

__all__ = ["Adapter", "AdapterCacheFull", "AdapterRefused", "AdapterTooLarge", "AdapterUnreachable"]


class AdapterTooLarge(AdapterRefused):
    """The adapter, or the archive with it, is larger than `adapters.max_mb`, or than the cache."""


class AdapterUnreachable(AdapterRefused):
    """The source did not give the adapter: not there, no access, no connection, or not in time."""


class AdapterCacheFull(TrivetError):
    """The adapters that workers of this host hold fill the cache, or its folder cannot be written to."""

    status = 503
    code = "adapter_cache_full"
    retry_after_s = 30


@dataclass(frozen=True)
class Adapter:
    """A verified LoRA adapter in a local folder that does not change any more.

    `version` names the content: equal files have equal versions, wherever they came from. `path` is the folder's
    absolute path, `rank` the largest of its modules' ranks, and `size` its bytes. `modules` are their full names, in
    the checkpoint.
    """

    name: str
    version: str
    path: str
    rank: int
    size: int
    modules: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"
