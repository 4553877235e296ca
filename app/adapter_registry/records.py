"""What Redis says of adapters."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

from pydantic import BaseModel, ConfigDict


def adapter_id(name: str, version: str) -> str:
    """How engines, KV blocks and workers' records call an adapter."""
    return f"{name}@{version}"


def lora_number(adapter: str) -> int:
    """vLLM's number for an adapter's id, the same everywhere: 1 to 2 ** 31 - 1.

    Its model runner V2, on GPUs, keeps them as 32-bit integers, and a larger one ends the engine. A worker refuses the
    second of two adapters with one number (workers/loras.py): with 1,000, one cluster in 4,000 has such a pair.
    """
    return (int.from_bytes(blake2b(adapter.encode(), digest_size=4).digest(), "big") >> 1) or 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Report(_Record):
    """What a worker says of a load. `refused`: the adapter is at fault, and not the worker. `size` is in bytes."""

    incarnation: str
    state: Literal["loaded", "failed"]
    version: str = ""
    rank: int = 0
    size: int = 0
    reason: str = ""
    refused: bool = False


class Load(_Record):
    """One attempt to give every worker an adapter, and how it ended: `reason` says why it failed.

    `workers` has a report of each that has spoken, `waiting` names those that had not when it was looked at last. Times
    are unix seconds, by Redis's clock; it has been `failing` since its first failure, and `deserted` since its last
    worker went. `unchanged`: this version of the adapter was published before.
    """

    load: str
    name: str
    uri: str
    state: Literal["loading", "published", "failed"]
    begun: float
    deadline: float
    workers: dict[str, Report] = {}
    waiting: dict[str, bool] = {}
    failing: float = 0.0
    deserted: float = 0.0
    ended: float = 0.0
    reason: str = ""
    version: str = ""
    unchanged: bool = False

    @property
    def refused(self) -> bool:
        """Whether it failed, and all that failed did so for the adapter's own sake."""
        failed = [report for report in self.workers.values() if report.state == "failed"]
        return bool(failed) and all(report.refused for report in failed)


class Published(_Record):
    """A name that requests may use. `load` is the load that published it, `at` when (unix seconds)."""

    name: str
    version: str
    uri: str
    rank: int
    size: int
    load: str
    at: float

    @property
    def id(self) -> str:
        return adapter_id(self.name, self.version)


class Wanted(_Record):
    """What a worker should hold. Loads have `left` seconds; `users` counts requests by adapter id."""

    published: dict[str, Published] = {}
    loads: dict[str, Load] = {}
    users: dict[str, int] = {}
    left: dict[str, float] = {}
