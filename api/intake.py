"""Media intake: every media part of a request passes here, and leaves as a reference.

Runs before vLLM's request model sees the body, so that a refusal names the field and no megabyte of base64 is validated
twice.
"""

from __future__ import annotations

import json
from typing import Any

from api import media_parts, references
from api.media_parts import Medium, Part, Shape
from api.media_sources import MediaSources
from app.errors import InvalidRequest, MediaRefused, MultimodalDisabled
from app.messages import MediaRef, Modality
from app.settings import Settings
from app.together import together

#: Body fields that only Trivet's own stages may set. vLLM takes them from `vllm_xargs`, too.
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds")
#: Settings with the most items of each modality in one request.
LIMITS: dict[Modality, str] = {"image": "max_images", "video": "max_videos", "audio": "max_audios"}

_Key = tuple[Modality, str | None, str | None]


class Admission:
    """The media of one request: references in its body, and what is held for them until `release`."""

    def __init__(self, sources: MediaSources | None, shape: Shape, found: list[tuple[Part, Medium]], salt: str) -> None:
        self._sources = sources
        self._shape = shape
        self._found = found
        self._salt = salt
        self._held: list[str] = []

    @property
    def held(self) -> tuple[str, ...]:
        """Identities, once for each time that they are held."""
        return tuple(self._held)

    async def enter(self) -> None:
        """Get all media, each once, and put the references into the body. Raises as `Intake.admit` does.

        Nobody is asked for anything while one of them is refused.
        """
        for _, medium in self._found:
            assert self._sources is not None
            self._sources.check(medium)
        distinct = {_key(medium): medium for _, medium in reversed(self._found)}
        refs = dict(zip(distinct, await together(self._take(one) for one in distinct.values()), strict=True))
        for part, medium in self._found:
            ref = refs[_key(medium)].model_copy(update={"param": medium.param})
            self._shape.write(part, references.to_url(ref))

    async def _take(self, medium: Medium) -> MediaRef:
        assert self._sources is not None
        return await self._sources.take(medium, self._salt, self._held)

    async def release(self) -> None:
        """The request has ended, and reads its media no more."""
        while self._held:
            assert self._sources is not None
            await self._sources.holder.release(self._held.pop())


class Intake:
    """Checks the media of requests. Where none are taken there need not be `sources`."""

    def __init__(self, settings: Settings, sources: MediaSources | None) -> None:
        self._settings = settings
        self._sources = sources

    async def admit(self, body: dict[str, Any], shape: Shape = media_parts.CHAT, tenant: str = "") -> Admission:
        """Replace the body's media by references, in place; what comes back has to be released when the request ends.

        `shape` tells where this API's bodies have them; each tenant has names of its own for them. Raises
        InvalidRequest, which names the part, MediaMemoryFull and MediaFetchesBusy; then nothing is held.
        """
        _refuse_internal(body, "")
        if isinstance(xargs := body.get("vllm_xargs"), dict):
            _refuse_internal(xargs, "vllm_xargs.")
        parts = list(shape.parts(body))
        if parts and not self._settings.enable_multimodal:
            first = parts[0][0]
            raise MultimodalDisabled("this server takes no media; start it with --enable-multimodal", param=first)
        found = [(part, shape.read(path, part)) for path, part in parts]
        self._check_number([medium for _, medium in found])
        # Who asks for a KV cache of its own has names of its own for its media, too: the encoder's cache goes by them.
        salt = body.get("cache_salt")
        salts = [tenant, salt if isinstance(salt, str) else ""]
        admission = Admission(self._sources, shape, found, json.dumps(salts) if any(salts) else "")
        try:
            await admission.enter()
        except BaseException:
            await admission.release()
            raise
        return admission

    def _check_number(self, found: list[Medium]) -> None:
        limits = self._settings.media
        if len(found) > limits.max_items:
            raise _too_many("media", found[limits.max_items], "max_items", limits.max_items)
        for modality, name in LIMITS.items():
            some, allowed = [medium for medium in found if medium.modality == modality], getattr(limits, name)
            if len(some) > allowed:
                raise _too_many(f"{modality} parts", some[allowed], name, allowed)


def _key(medium: Medium) -> _Key:
    return medium.modality, medium.url, medium.uuid


def _too_many(what: str, first: Medium, setting: str, allowed: int) -> MediaRefused:
    return MediaRefused(f"more {what} than media.{setting} allows ({allowed})", param=first.param)


def _refuse_internal(fields: dict[str, Any], path: str) -> None:
    for name in INTERNAL_FIELDS:
        # Clients that send every field they know send null.
        if fields.pop(name, None) is not None:
            raise InvalidRequest(f"{name} is not taken from clients", param=f"{path}{name}")
