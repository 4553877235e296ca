"""The settings of LoRA adapters: where they may come from, and how much of them a host keeps."""

from __future__ import annotations

from pydantic import Field, field_validator

from app.settings_sections import Section


class AdapterSettings(Section):
    cache_directory: str | None = None
    """Folder that keeps fetched adapters, one for all workers of a host; `trivet/adapters` in the user's cache
    directory when not given."""
    cache_gb: float = Field(20.0, gt=0)
    """Adapters kept there, in GB; the least recently used go first, and none that a worker holds."""
    max_mb: float = Field(2048.0, gt=0)
    """Largest adapter, and largest archive with one, packed and unpacked, in MB."""
    fetch_timeout_s: float = Field(300.0, gt=0)
    """Longest fetch of an adapter from its source, waiting for another worker's fetch of it included."""
    allowed_root: str | None = None
    """Folder below which `file://` sources and plain paths may lie. Not given: they are refused."""
    s3_endpoint_url: str | None = None
    """S3-compatible server for `s3://` sources; the one that AWS's own variables name when not given. Those also have
    the credentials and the region."""

    @field_validator("s3_endpoint_url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return value
