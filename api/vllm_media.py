"""Adapter to vLLM: the media connector that its chat parser gets, which opens no URL and decodes nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

#: Scheme of the references that the intake puts in the place of all URLs, so that no client can use it.
SCHEME = "trivet:"
NAME = "trivet"


class MediaReference:
    """What stands for a medium in the API process: its identity and its size in bytes."""

    def __init__(self, identity: str, size: int) -> None:
        self.identity = identity
        self.size = size

    @classmethod
    def parse(cls, url: str) -> MediaReference:
        identity, _, size = url.removeprefix(SCHEME).partition(":")
        return cls(identity, int(size))

    def __str__(self) -> str:
        return f"{SCHEME}{self.identity}:{self.size}"


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class ReferenceConnector(MediaConnector):
    """Takes references, refuses everything else: what the media policy refused is fetched by nobody."""

    async def fetch_image_async(self, image_url: str, **_: Any) -> Any:
        if not image_url.startswith(SCHEME):
            _refuse()
        return MediaReference.parse(image_url)

    def load_from_url(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    async def load_from_url_async(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise ValueError("media that did not pass the intake")
