"""The sections of the settings about media, and about the URLs that they come from."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, IPvAnyNetwork, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from app.settings_sections import Section, words

#: A host, or all below one.
HOST_PATTERN = re.compile(r"(\*\.)?[^\s/@:?#\\%*]+|\[[0-9a-fA-F:.]+\]")
PROXY = re.compile(r"https?://([^\s/@]+@)?([^\s/@:\[\]]+|\[[0-9a-fA-F:.]+\]):[0-9]+/?")


class MediaSettings(Section):
    max_items: int = Field(16, ge=1)
    """Most media parts in one request."""
    max_images: int = Field(16, ge=0)
    """Most images in one request. What the model takes, and vLLM's `--limit-mm-per-prompt`, can only be less."""
    max_videos: int = Field(4, ge=0)
    """Most videos in one request."""
    max_audios: int = Field(8, ge=0)
    """Most audio parts in one request."""
    max_item_mb: float = Field(32.0, gt=0)
    """Largest medium, in MB of its encoded bytes."""
    max_image_pixels: int = Field(64_000_000, ge=1)
    """Largest image, in pixels, read from its header before it is decoded."""
    max_video_frames: int = Field(1024, ge=1)
    """Most frames in a video that is given as frames (`data:video/jpeg`)."""
    max_video_seconds: float = Field(600.0, gt=0)
    """Longest video in a file, by its header, in seconds."""
    max_video_pixels: int = Field(512_000_000, ge=1)
    """Most pixels in all frames that the model takes of a video: each takes three bytes in a worker."""
    max_video_decoded_pixels: int = Field(20_000_000_000, ge=1)
    """Most pixels in all frames of a video in a file, by its header: a worker decodes those that it skips, too."""
    decoded_mb: float = Field(2048.0, gt=0)
    """Memory of a worker for decoded media, in MB, until the model's processor is done with them. Others wait; a medium
    or a prompt with more of it is alone."""
    max_item_tokens: int = Field(16384, ge=1)
    """Most prompt tokens with an embedding that one medium may become."""
    uuid_ttl_s: int = Field(86400, ge=1)
    """How long a client's `uuid` stands for a medium, after its last use."""
    rebind_uuids: bool = True
    """Let a `uuid` that comes with another medium stand for that one from now on; else such a request gets 400."""
    trust_mm_processor_kwargs: bool = False
    """Take a request's `mm_processor_kwargs`: they can make a worker compute as much as they like."""
    max_audio_seconds: float = Field(600.0, gt=0)
    """Longest audio, by its header, in seconds."""
    max_audio_decoded_mb: float = Field(256.0, gt=0)
    """Largest audio once it is decoded to 32-bit samples of every channel, in MB."""


class MediaUrlSettings(Section):
    allowed_media_domains: Annotated[frozenset[str], NoDecode] = frozenset()
    """The only hosts that media are fetched from, comma-separated: `example.com`, or `*.example.com` for every name
    below it. Not given: every public host."""
    denied_media_domains: Annotated[frozenset[str], NoDecode] = frozenset()
    """Hosts that media are never fetched from, written in the same way."""
    schemes: Annotated[frozenset[Literal["http", "https"]], NoDecode] = frozenset({"http", "https"})
    """Schemes of URLs that are fetched."""
    allowed_ports: Annotated[frozenset[str], NoDecode] = frozenset({"80", "443"})
    """Ports that URLs may name, comma-separated, or `any`."""
    allow_private: Annotated[frozenset[IPvAnyNetwork], NoDecode] = frozenset()
    """Networks that may be fetched from although they are private, loopback, link-local or reserved: `10.1.0.0/16`."""
    allow_redirects: bool = True
    """Follow redirects, 3 at most; each passes the whole policy again."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """Longest wait for a host's address and for a connection to it."""
    fetch_timeout_s: float = Field(30.0, gt=0)
    """Longest fetch of one medium, redirects and a slow body included."""
    max_concurrent_fetches: int = Field(32, ge=1)
    """Most media that an API process fetches at once; each takes up to `media.max_item_mb` of memory meanwhile."""
    proxy_url: str | None = None
    """HTTP proxy that fetches go through: `http://user:password@proxy:3128`. It, and no longer this server, decides
    which addresses a name may have."""
    ca_bundle: str | None = None
    """PEM file with certificate authorities to trust beside the usual ones."""
    allowed_local_media_path: str | None = None
    """Folder whose files `file:` URLs may name. Not given: `file:` URLs are refused."""
    identity: Literal["content", "url"] = "content"
    """What names a fetched medium: its `content`, asking the host each time whether it changed, or the text of its
    `url`, which is asked for once."""
    memo_ttl_s: int = Field(86400, ge=1)
    """How long Redis remembers what a URL gave, after its last use."""

    @field_validator(
        "allowed_media_domains", "denied_media_domains", "schemes", "allowed_ports", "allow_private", mode="before"
    )
    @classmethod
    def _split(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return words(value)
        if info.field_name == "allowed_ports" and isinstance(value, list):  # a TOML file has numbers
            return [str(one) for one in value]
        return value

    @field_validator("allowed_ports")
    @classmethod
    def _ports(cls, value: frozenset[str]) -> frozenset[str]:
        for one in value:
            if one != "any" and not (re.fullmatch(r"[1-9][0-9]{0,4}", one) and int(one) <= 65535):
                raise ValueError(f"{one!r} is no port: write numbers from 1 to 65535, or any")
        return value

    @field_validator("allowed_media_domains", "denied_media_domains")
    @classmethod
    def _hosts(cls, value: frozenset[str]) -> frozenset[str]:
        for one in value:
            if not HOST_PATTERN.fullmatch(one):
                raise ValueError(f"{one!r} is no host: write example.com or *.example.com, without scheme and port")
        return value

    @field_validator("schemes", "allowed_ports")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if not value:
            raise ValueError("name at least one")
        return value

    @field_validator("proxy_url")
    @classmethod
    def _proxy(cls, value: str | None) -> str | None:
        if value is not None and not PROXY.fullmatch(value):
            raise ValueError("must be http:// or https://, with a host and a port: http://user:password@proxy:3128")
        return value
