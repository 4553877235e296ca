"""LoRA adapters: from a source, `s3://bucket/prefix` say, to a verified folder that all workers of a host share.

    check_name("sql", taken={"base-model"})
    adapter = await fetch("sql", "s3://adapters/sql", settings.adapters, max_rank=16)
    ... adapter.id, adapter.path ...
    release(adapter)

What `fetch` returns stays on the disk until this process releases it as often as it fetched it, or ends.
"""

from app.adapters.base import Adapter, AdapterCacheFull, AdapterRefused, AdapterTooLarge, AdapterUnreachable
from app.adapters.fetch import fetch, release
from app.adapters.names import check_name

__all__ = [
    "Adapter",
    "AdapterCacheFull",
    "AdapterRefused",
    "AdapterTooLarge",
    "AdapterUnreachable",
    "check_name",
    "fetch",
    "release",
]
