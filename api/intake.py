"""Media intake: every media part of a request passes here, and leaves as a reference.

Runs before vLLM's request model sees the body, so that a refusal names the field and no megabyte of base64 is validated
twice.
"""

from __future__ import annotations

import asyncio
from typing import Any

from app import media
from app.errors import InvalidRequest, MediaRefused, MultimodalDisabled
from app.media import MediaStore
from app.settings import Settings

#: Content parts that hold no media.
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
#: Body fields that only Trivet's own stages may set.
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")


class Intake:
    """Checks media and puts their bytes where the worker that encodes them can fetch them."""

    def __init__(self, settings: Settings, store: MediaStore) -> None:
        self._settings = settings
        self._store = store

    async def admit(self, body: dict[str, Any]) -> None:
        """Replace the body's media by references, in place. Raises InvalidRequest, which names the part."""
        for name in INTERNAL_FIELDS:
            body.pop(name, None)
        parts = list(_media_parts(body))
        if not parts:
            return
        self._check_number(parts)
        # Who asks for a KV cache of its own has names of its own for its media, too: the encoder's cache goes by them.
        salt = body.get("cache_salt")
        # One at a time: a request must not hold many decoded media in memory at once.
        for param, part in parts:
            await self._take(param, part, salt if isinstance(salt, str) else "")

    def _check_number(self, parts: list[tuple[str, dict[str, Any]]]) -> None:
        first = parts[0][0]
        if not self._settings.enable_multimodal:
            raise MultimodalDisabled("this server takes no media; start it with --enable-multimodal", param=first)
        if len(parts) > self._settings.media.max_items:
            allowed = self._settings.media.max_items
            raise MediaRefused(f"more media than media.max_items allows ({allowed})", param=first)

    async def _take(self, param: str, part: dict[str, Any], salt: str) -> None:
        if part.get("type") != "image_url":
            raise MediaRefused("this kind of content part is not supported; image_url is", param=param)
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise MediaRefused("image_url needs a url", param=f"{param}.image_url")
        identity, size = await self._store_image(url, f"{param}.image_url", salt)
        part.clear()
        part.update(type="image_url", image_url={"url": f"trivet:{identity}:{size}"})

    async def _store_image(self, url: str, param: str, salt: str) -> tuple[str, int]:
        limits = self._settings.media
        identity, data = await asyncio.to_thread(self._identify, url, int(limits.max_item_mb * 1e6), param, salt)
        await self._store.put(identity, data, self._settings.api.request_timeout_s)
        return identity, len(data)

    def _identify(self, url: str, max_bytes: int, param: str, salt: str) -> tuple[str, bytes]:
        data = media.decode(url, max_bytes, param)
        media.check_image(data, self._settings.media.max_image_pixels, param)
        return media.identify(data, modality="image", model=self._settings.model, salt=salt), data


def _media_parts(body: dict[str, Any]) -> Any:
    """(path, part) of every content part that is not plain text. Wrong shapes are left to the request model."""
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else []):
            if not isinstance(part, dict):
                continue
            kind = part.get("type")
            if not isinstance(kind, str):
                raise InvalidRequest("a content part needs a type", param=f"messages[{i}].content[{j}].type")
            if kind not in TEXT_PARTS:
                yield f"messages[{i}].content[{j}]", part
