"""Where adapters come from: one module per scheme."""

from __future__ import annotations

from typing import Protocol

from app.adapters.base import AdapterRefused
from app.adapters.intake import Intake
from app.adapters.sources.archive import ArchiveSource
from app.adapters.sources.hub import HubSource
from app.adapters.sources.local import LocalSource
from app.adapters.sources.s3 import S3Source
from app.settings_adapters import AdapterSettings
from app.settings_media import MediaUrlSettings

MAX_LENGTH = 8192


class Source(Protocol):
    def take(self, intake: Intake) -> None:
        """Write the adapter's files. Blocks, within the intake's limits. Raises an AdapterRefused."""


def find(source: str, settings: AdapterSettings, urls: MediaUrlSettings) -> Source:
    """The source that the text names. Raises AdapterRefused for one that is not written well, or is not allowed."""
    if not source or len(source) > MAX_LENGTH or not source.isprintable():
        raise AdapterRefused(
            f"the adapter's source is empty, longer than {MAX_LENGTH} characters, or has control characters in it"
        )
    scheme = source.partition(":")[0].lower() if not source.startswith("/") else "file"
    if scheme == "file":
        return LocalSource(source, settings.allowed_root)
    if scheme == "s3":
        return S3Source(source, settings.s3_endpoint_url)
    if scheme == "hf":
        return HubSource(source)
    if scheme == "https":
        return ArchiveSource(source, urls)
    raise AdapterRefused(
        "an adapter's source is s3://bucket/prefix, hf://org/repo, the https:// URL of an archive, file:///path, or an "
        "absolute path"
    )
