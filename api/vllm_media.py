"""Adapter to vLLM: the media connector that its chat parser gets, which opens no URL and decodes nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from api import references
from app.messages.media import MediaRef

NAME = "trivet"


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class ReferenceConnector(MediaConnector):
    """Takes references, refuses everything else: what the media policy refused is fetched by nobody."""

    async def fetch_image_async(self, image_url: str, **_: Any) -> MediaRef:
        return references.from_url(image_url)

    async def fetch_audio_async(self, audio_url: str, **_: Any) -> MediaRef:
        return references.from_url(audio_url)

    async def fetch_video_async(self, video_url: str, **_: Any) -> MediaRef:
        return references.from_url(video_url)

    def load_from_url(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    async def load_from_url_async(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    def fetch_image_embedding(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    async def fetch_image_embedding_async(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    fetch_audio_embedding = fetch_video_embedding = fetch_image_embedding
    fetch_audio_embedding_async = fetch_video_embedding_async = fetch_image_embedding_async


def _refuse() -> NoReturn:
    raise references.ForeignReference("media that did not pass the intake")
