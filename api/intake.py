"""Media intake: every media part of a request passes here, and leaves as a reference.

Runs before vLLM's request model sees the body, so that a refusal names the field and no megabyte of base64 is validated
twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from api import references
from app import media
from app.errors import InvalidRequest, MediaRefused, MultimodalDisabled
from app.media import MediaHolder
from app.messages import MediaRef, Modality
from app.settings import Settings

#: Content parts with a medium, and its kind. The part has the URL under the same name.
MEDIA_PARTS: dict[str, Modality] = {"image_url": "image", "video_url": "video"}
#: Content parts that hold no media.
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
#: Embeddings that a client made: of the wrong shape they end an engine, and nothing tells whose they are.
EMBEDS = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
#: What vLLM's chat parser may take for a medium, whatever the part says that it is.
MEDIA_FIELDS = EMBEDS | {"image_url", "video_url", "audio_url", "input_audio", "input_image", "image_pil"}
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

    async def admit(self, body: dict[str, Any]) -> list[str]:
        """Replace the body's media by references, in place, and answer what `release` has to get when it ends.

        Raises InvalidRequest, which names the part, and MediaMemoryFull; then nothing is held.
        """
        _refuse_internal(body, "")
        if isinstance(xargs := body.get("vllm_xargs"), dict):
            _refuse_internal(xargs, "vllm_xargs.")
        parts = list(_media_parts(body))
        if not parts:
            return []
        self._check_number(parts)
        # Who asks for a KV cache of its own has names of its own for its media, too: the encoder's cache goes by them.
        salt = body.get("cache_salt")
        request = _Request(salt if isinstance(salt, str) else "")
        try:
            # One at a time: a request must not hold many decoded media in memory at once.
            for param, part in parts:
                await self._take(param, part, request)
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

    async def _take(self, param: str, part: dict[str, Any], request: _Request) -> None:
        kind = part["type"]
        modality = MEDIA_PARTS.get(kind)
        if modality is None:
            known = " and ".join(MEDIA_PARTS)
            raise MediaRefused(f"this kind of content part is not supported; {known} are", param=param)
        url = part.get(kind)
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise MediaRefused(f"{kind} needs a url", param=f"{param}.{kind}")
        ref = await self._reference(url, modality, f"{param}.{kind}", request)
        part.clear()
        part.update({"type": kind, kind: {"url": references.to_url(ref)}})

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


def _media_parts(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, part) of every content part that is not plain text. Wrong shapes are left to the request model."""
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict) and _is_media(part, f"messages[{i}].content[{j}]"):
                yield f"messages[{i}].content[{j}]", part


def _is_media(part: dict[str, Any], path: str) -> bool:
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest("a content part needs a type", param=f"{path}.type")
    if kind in EMBEDS:
        raise MediaRefused("embeddings are not taken from clients; send the medium itself", param=f"{path}.{kind}")
    if kind not in TEXT_PARTS and kind not in MEDIA_PARTS:
        return True  # to be refused, whatever is in it
    for name in sorted(MEDIA_FIELDS & part.keys() - {kind}):
        if part.pop(name) is not None:
            raise MediaRefused(f"a content part of type {kind} cannot have this field", param=f"{path}.{name}")
    return kind in MEDIA_PARTS
