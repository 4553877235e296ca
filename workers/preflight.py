"""Whether a worker's settings make sense together, before anything is loaded."""

from __future__ import annotations

from app.media import fingerprint
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
