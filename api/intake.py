"""Media intake: every media part of a request passes here, and leaves as a reference.

Runs before vLLM's request model sees the body, so that a refusal names the field and no megabyte of base64 is validated
twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from api import media_parts, references
from api.media_parts import Shape
from app import media
from app.errors import InvalidRequest, MediaRefused, MultimodalDisabled
from app.media import MediaHolder
from app.messages import MediaRef, Modality
from app.settings import Settings

#: Body fields that only Trivet's own stages may set. vLLM takes them from `vllm_xargs`, too.
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds")
#: How much longer than the longest request its media are kept, should nobody release them.
LEASE_MARGIN_S = 30.0


@dataclass
class _Request:
    """What is known of one request's media. `seen` has those that were taken, by kind and URL."""

    salt: str
    seen: dict[tuple[Modality, str], MediaRef] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)


class Intake:
    """Checks media and puts their bytes where workers can read them.

    `fingerprint` names the model and its processor's settings (`app.media.fingerprint`). Where no media are taken there
    need not be a `holder`.
    """

    def __init__(self, settings: Settings, holder: MediaHolder | None, fingerprint: str) -> None:
        self._settings = settings
        self._holder = holder
        self._fingerprint = fingerprint

    async def admit(self, body: dict[str, Any], shape: Shape = media_parts.CHAT, tenant: str = "") -> list[str]:
        """Replace the body's media by references, in place, and answer what `release` has to get when it ends.

        `shape` tells where this API's bodies have them; each tenant has names of its own for them. Raises
        InvalidRequest, which names the part, and MediaMemoryFull; then nothing is held.
        """
        _refuse_internal(body, "")
        if isinstance(xargs := body.get("vllm_xargs"), dict):
            _refuse_internal(xargs, "vllm_xargs.")
        parts = list(shape.parts(body))
        if not parts:
            return []
        self._check_number(parts)
        # Who asks for a KV cache of its own has names of its own for its media, too: the encoder's cache goes by them.
        salt = body.get("cache_salt")
        salts = [tenant, salt if isinstance(salt, str) else ""]
        request = _Request(json.dumps(salts) if any(salts) else "")
        try:
            # One at a time: a request must not hold many decoded media in memory at once.
            for path, part in parts:
                await self._take(shape, path, part, request)
        except BaseException:
            await self.release(request.held)
            raise
        return request.held

    async def release(self, identities: Iterable[str]) -> None:
        """A request has ended, and reads its media no more: each once, as `admit` answered them."""
        for identity in identities:
            assert self._holder is not None
            await self._holder.release(identity)

    def _check_number(self, parts: list[tuple[str, dict[str, Any]]]) -> None:
        first = parts[0][0]
        if not self._settings.enable_multimodal:
            raise MultimodalDisabled("this server takes no media; start it with --enable-multimodal", param=first)
        if len(parts) > self._settings.media.max_items:
            allowed = self._settings.media.max_items
            raise MediaRefused(f"more media than media.max_items allows ({allowed})", param=first)

    async def _take(self, shape: Shape, path: str, part: dict[str, Any], request: _Request) -> None:
        url, modality, param = shape.read(path, part)
        shape.write(part, references.to_url(await self._reference(url, modality, param, request)))

    async def _reference(self, url: str, modality: Modality, param: str, request: _Request) -> MediaRef:
        known = request.seen.get((modality, url))
        if known is not None:
            return known.model_copy(update={"param": param})
        identity, data, media_type = await asyncio.to_thread(self._read, url, modality, param, request.salt)
        lease_s = self._settings.api.request_timeout_s + LEASE_MARGIN_S
        assert self._holder is not None
        source = await self._holder.put(identity, data, lease_s)
        request.held.append(identity)
        ref = MediaRef(
            modality=modality, identity=identity, size=len(data), media_type=media_type, param=param, source=source
        )
        request.seen[modality, url] = ref
        return ref

    def _read(self, url: str, modality: Modality, param: str, salt: str) -> tuple[str, bytes, str]:
        limits = self._settings.media
        data, media_type = media.decode(url, modality, int(limits.max_item_mb * 1e6), param)
        if modality == "image":
            media.check_image(data, limits.max_image_pixels, param)
        else:
            media.check_video(data, media_type, limits, param)
        name = media.identify(data, modality=modality, model=self._fingerprint, media_type=media_type, salt=salt)
        return name, data, media_type


def _refuse_internal(fields: dict[str, Any], path: str) -> None:
    for name in INTERNAL_FIELDS:
        # Clients that send every field they know send null.
        if fields.pop(name, None) is not None:
            raise InvalidRequest(f"{name} is not taken from clients", param=f"{path}{name}")
