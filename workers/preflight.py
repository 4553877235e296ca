"""Whether a worker's settings make sense together, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from app.media import fingerprint
from app.registry import WorkerRecord
from app.roles import Role
from app.settings import Settings


class MisconfiguredWorker(RuntimeError):
    """The worker's settings contradict each other; it must not start."""


def check(settings: Settings) -> None:
    """Raise MisconfiguredWorker for roles that the other settings forbid, SettingsError for flags that contradict."""
    roles = settings.roles
    if Role.ENCODE in roles and not settings.enable_multimodal:
        raise MisconfiguredWorker(
            "a worker with the encode role takes media from clients, which needs consent: start it with "
            "--enable-multimodal (TRIVET_ENABLE_MULTIMODAL=true), or without encode among its roles"
        )
    if settings.enable_multimodal:
        fingerprint.shared_fields(settings)  # before minutes of loading
    if {Role.ENCODE, Role.DECODE} <= roles and Role.PREFILL not in roles:
        raise MisconfiguredWorker(
            "encode and decode without prefill is no set of roles: an engine that takes KV blocks from others never "
            "prefills a prompt of its own; give the roles to two workers"
        )
    split = len({Role.ENCODE, Role.PREFILL} & roles) == 1
    if settings.enable_multimodal and split and not settings.multimodal_embedding_cache_capacity_gb:
        raise MisconfiguredWorker(
            "embeddings go from encode to prefill workers through their embedding caches: give both some memory "
            "(TRIVET_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB), or one worker both roles"
        )


def check_blocks(own: WorkerRecord, others: Iterable[WorkerRecord]) -> None:
    """Raise MisconfiguredWorker if a worker of the same model has KV blocks of another size.

    A prompt's blocks have one name in the whole fleet, and engines hand blocks on as they are.
    """
    cached = {Role.PREFILL, Role.DECODE}
    if not own.roles & cached:
        return
    for other in others:
        same = other.model == own.model and other.id != own.id and other.roles & cached
        if same and other.engine.block_size != own.engine.block_size:
            raise MisconfiguredWorker(
                f"KV blocks of {own.engine.block_size} tokens here, of {other.engine.block_size} in worker {other.id}, "
                f"which serves {own.model} too: give all of them the same --block-size, or stop that worker first"
            )
