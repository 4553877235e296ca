"""What an adapter is, and what can be wrong with one."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import InvalidRequest, TrivetError


class AdapterRefused(InvalidRequest):
    """An adapter, its name or its source is not allowed, or not what it claims to be. The message says why."""

    code = "invalid_adapter"


class AdapterTooLarge(AdapterRefused):
    """The adapter, or the archive with it, is larger than `adapters.max_mb`, or than the cache."""

    code = "adapter_too_large"


class AdapterUnreachable(AdapterRefused):
    """The source did not give the adapter: not there, no access, no connection, or not in time."""

    code = "adapter_unreachable"


class AdapterCacheFull(TrivetError):
    """The adapters that workers of this host hold fill the cache, or its disk is full."""

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
