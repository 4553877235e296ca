"""Who serves: worker records in Redis, renewed by a heartbeat and gone with their lease."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from app import keys
from app.messages.media import Modality
from app.messages.plans import Assignment
from app.roles import Does, KVRole, Role, kv_role

log = logging.getLogger(__name__)


class EngineState(BaseModel):
    """What the engine said of itself. Sizes are in tokens and those of one rank, `kv_usage` is 0 to 1.

    `max_loras` adapters run at once and `max_cpu_loras` can be held; 0 without `--enable-lora`. `resident_loras` are
    the ids of those that ran last, and need not be brought to the device.
    """

    model_config = ConfigDict(extra="forbid")

    vllm: str
    max_model_len: int
    block_size: int
    kv_tokens: int
    data_parallel_size: int = 1
    max_loras: int = 0
    max_cpu_loras: int = 0
    resident_loras: list[str] = []
    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0


class WorkerRecord(BaseModel):
    """A registered worker. `incarnation` changes with every start; times are unix seconds.

    `does` is what its model makes of prompts. `fingerprint` names the model and its processor settings: workers share
    items only with their equals. `spliceable` says that prompts of this model can be put together from item records,
    and `placeholders` what then stands for an item of each modality in a prompt that is not expanded, in token ids.
    `adapters` are the ids of those that it holds, and `adapters_failed` says why it does not hold others that it
    should.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    incarnation: str
    roles: frozenset[Role]
    model: str
    does: Does = Does.GENERATE
    multimodal: bool
    pid: int
    host: str
    concurrency: int
    metrics: str
    fingerprint: str = ""
    spliceable: bool = False
    placeholders: dict[Modality, list[int]] = {}
    adapters: list[str] = []
    adapters_failed: dict[str, str] = {}
    engine: EngineState
    started: float
    in_flight: int = 0
    draining: bool = False

    @property
    def kv_role(self) -> KVRole:
        return kv_role(self.roles)

    @property
    def assignment(self) -> Assignment:
        return Assignment(worker=self.id, incarnation=self.incarnation)

    @property
    def runs_language_model(self) -> bool:
        """Whether adapters matter to it. One that only encodes computes the same for all of them."""
        return bool(self.roles & {Role.PREFILL, Role.DECODE})

    @property
    def prefills_and_decodes(self) -> bool:
        return {Role.PREFILL, Role.DECODE} <= self.roles


class Registry:
    """The workers' entries in Redis. `redis` is an asyncio client."""

    def __init__(self, redis: Any, lease_s: float) -> None:
        self._redis = redis
        self._lease_ms = max(1, int(lease_s * 1000))
        self._unreadable: set[str] = set()

    async def announce(self, record: WorkerRecord) -> None:
        """Register, or renew the lease and the load."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.sadd(keys.WORKERS, record.id)
        pipe.set(keys.worker(record.id), record.model_dump_json(), px=self._lease_ms)
        await pipe.execute()

    async def remove(self, worker_id: str) -> None:
        pipe = self._redis.pipeline(transaction=True)
        pipe.srem(keys.WORKERS, worker_id)
        pipe.delete(keys.worker(worker_id))
        await pipe.execute()

    async def workers(self) -> list[WorkerRecord]:
        """All workers with a lease. Members whose lease has run out are removed in passing."""
        ids = sorted(_text(member) for member in await self._redis.smembers(keys.WORKERS))
        if not ids:
            return []
        values = await self._redis.mget([keys.worker(one) for one in ids])
        records = [self._parse(one, value) for one, value in zip(ids, values, strict=True) if value is not None]
        gone = [one for one, value in zip(ids, values, strict=True) if value is None]
        if gone:
            log.warning("workers gone (lease expired): %s", ", ".join(gone))
            await self._redis.srem(keys.WORKERS, *gone)
        return [record for record in records if record is not None]

    def _parse(self, worker_id: str, value: bytes | str) -> WorkerRecord | None:
        """The record; None, which is said once for each worker, if it is none."""
        try:
            record = WorkerRecord.model_validate_json(value)
        except ValidationError as error:
            if worker_id not in self._unreadable:
                details = [(one["loc"], one["type"]) for one in error.errors(include_input=False, include_url=False)]
                log.error("unreadable record of worker %s (another version of Trivet?): %s", worker_id, details)
            self._unreadable.add(worker_id)
            return None
        self._unreadable.discard(worker_id)
        return record


@dataclass(frozen=True)
class Fleet:
    """The live workers of one model, as seen at one moment."""

    workers: tuple[WorkerRecord, ...] = field(default=())

    @classmethod
    def of(cls, workers: Iterable[WorkerRecord], model: str) -> Fleet:
        return cls(tuple(worker for worker in workers if worker.model == model))

    def without(self, lost: Collection[Assignment]) -> Fleet:
        return Fleet(tuple(w for w in self.workers if w.assignment not in lost)) if lost else self

    def doing(self, does: Does) -> Fleet:
        """Those whose model does this."""
        return Fleet(tuple(w for w in self.workers if w.does is does))

    def holding(self, adapter: str) -> Fleet:
        """Without those that could run a stage of a request for this adapter (an id, or "") and do not hold it."""
        if not adapter:
            return self
        return Fleet(tuple(w for w in self.workers if adapter in w.adapters or not w.runs_language_model))

    def find(self, worker_id: str, incarnation: str) -> WorkerRecord | None:
        return next((w for w in self.workers if w.id == worker_id and w.incarnation == incarnation), None)

    @property
    def open(self) -> list[WorkerRecord]:
        """Workers that take new requests."""
        return [w for w in self.workers if not w.draining]

    @property
    def block_size(self) -> int:
        """Tokens in a KV block: the same for all workers that have blocks. 0 while there is none."""
        return next((w.engine.block_size for w in self.workers if w.roles & {Role.PREFILL, Role.DECODE}), 0)

    def placeholders(self, fingerprint: str) -> dict[Modality, list[int]]:
        """What stands for an item of each modality, as the workers of this fingerprint found out."""
        return next((w.placeholders for w in self.workers if w.fingerprint == fingerprint and w.placeholders), {})

    def aggregated(self, media: bool) -> list[WorkerRecord]:
        """Workers that can prefill and decode a request."""
        return [w for w in self.open if w.prefills_and_decodes and (not media or w.multimodal)]

    def prefillers(self, media: bool) -> list[WorkerRecord]:
        """Workers that give KV blocks away."""
        return [w for w in self.open if w.kv_role is KVRole.PRODUCER and (not media or w.multimodal)]

    def decoders(self) -> list[WorkerRecord]:
        """Workers that take KV blocks."""
        return [w for w in self.open if w.kv_role is KVRole.CONSUMER]

    def encoders(self, fingerprint: str) -> list[WorkerRecord]:
        """Workers that encode for others. One that prefills too encodes what it needs itself."""
        return [
            w
            for w in self.open
            if Role.ENCODE in w.roles and Role.PREFILL not in w.roles and w.spliceable and w.fingerprint == fingerprint
        ]

    def missing(self, media: bool) -> list[Role]:
        """Roles without which no request (with or without media) can be served; empty when one can.

        Encode workers are none of them: a worker that prefills media can encode them, too.
        """
        if self.aggregated(media) or (self.prefillers(media) and self.decoders()):
            return []
        wanted = frozenset({Role.PREFILL, Role.DECODE})
        held = frozenset[Role]().union(*(w.roles for w in self.open))
        able = frozenset[Role]().union(*(w.roles for w in self.open if not media or w.multimodal))
        return sorted(wanted - held) or sorted(wanted - able) or sorted(wanted)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
