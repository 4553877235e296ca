"""Media intake: every media part of a request passes here, and leaves as a reference.

Runs before vLLM's request model sees the body, so that a refusal names the field and no megabyte of base64 is validated
twice.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from api import media_parts, processor_kwargs, references
from api.media_parts import Medium, Part, Shape
from api.media_sources import MediaSources, Naming, Taken
from app.errors.media import MediaRefused
from app.errors.requests import InvalidRequest, MultimodalDisabled
from app.messages.media import Modality
from app.settings import Settings
from app.together import together

#: Body fields that only Trivet's own stages may set. vLLM takes them from `vllm_xargs`, too.
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds")
#: Settings with the most items of each modality in one request.
LIMITS: dict[Modality, str] = {"image": "max_images", "video": "max_videos", "audio": "max_audios"}

_Key = tuple[Modality, str | None, str | None]
_Found = list[tuple[Part, Medium]]


class _Borrowed(NamedTuple):
    part: Part
    medium: Medium
    identity: str


class Admission:
    """The media of one request: references in its body, and what is held for them until `release`."""

    def __init__(self, sources: MediaSources | None, shape: Shape, naming: Naming) -> None:
        self._sources = sources
        self._shape = shape
        self._naming = naming
        self._borrowed: list[_Borrowed] = []
        self._held: list[str] = []

    @property
    def held(self) -> tuple[str, ...]:
        """Identities, once for each time that they are held."""
        return tuple(self._held)

    def borrows(self, param: str | None) -> bool:
        """Whether the medium of this field may be gone when a worker comes for it; then `renew` is worth a try."""
        return any(one.medium.param == param for one in self._borrowed)

    async def enter(self, found: _Found) -> None:
        """Get all media, each once, and put the references into the body. Raises as `Intake.admit` does.

        Nobody is asked for anything while one of them is refused.
        """
        if not found:
            return
        for _, medium in found:
            assert self._sources is not None
            self._sources.check(medium)
        await self._replace(found, anew=False)

    async def renew(self, param: str | None) -> None:
        """Get the medium of this field, which was borrowed and is gone, and that of others that have the same one.

        Raises as `Intake.admit` does.
        """
        gone = {one.identity for one in self._borrowed if one.medium.param == param}
        again = [(one.part, one.medium) for one in self._borrowed if one.identity in gone]
        self._borrowed = [one for one in self._borrowed if one.identity not in gone]
        await self._replace(again, anew=True)

    async def _replace(self, found: _Found, *, anew: bool) -> None:
        taken = await self._take_all(found, anew)
        _check_uuids(found, taken)
        for part, medium in found:
            ref, borrowed = taken[_key(medium)]
            if borrowed:  # no medium that came with the request is kept in it: base64 is large
                self._borrowed.append(_Borrowed(part, medium, ref.identity))
            self._shape.write(part, references.to_url(ref.model_copy(update={"param": medium.param})))

    async def _take_all(self, found: _Found, anew: bool) -> dict[_Key, Taken]:
        """A uuid alone means what came with it in the same request, so those parts are the last."""
        taken: dict[_Key, Taken] = {}
        for alone in (False, True):
            distinct = {_key(medium): medium for _, medium in reversed(found) if (medium.url is None) is alone}
            each = await together(self._take(one, anew) for one in distinct.values())
            taken |= zip(distinct, each, strict=True)
        return taken

    async def _take(self, medium: Medium, anew: bool) -> Taken:
        assert self._sources is not None
        return await self._sources.take(medium, self._naming, self._held, anew=anew)

    async def release(self) -> None:
        """The request has ended, and reads its media no more."""
        while self._held:
            assert self._sources is not None
            self._sources.holder.release(self._held.pop())


class Intake:
    """Checks the media of requests. Where none are taken there need not be `sources`."""

    def __init__(self, settings: Settings, sources: MediaSources | None) -> None:
        self._settings = settings
        self._sources = sources

    async def admit(self, body: dict[str, Any], shape: Shape = media_parts.CHAT, tenant: str = "") -> Admission:
        """Replace the body's media by references, in place; what comes back has to be released when the request ends.

        `shape` tells where this API's bodies have them; each tenant has names of its own for them. Raises
        InvalidRequest, which names the part, MediaMemoryFull, MediaFetchesBusy, and BrokerUnavailable for what needs
        Redis; then nothing is held.
        """
        _refuse_internal(body, "")
        if isinstance(xargs := body.get("vllm_xargs"), dict):
            _refuse_internal(xargs, "vllm_xargs.")
        kwargs = processor_kwargs.taken(body, trusted=self._settings.media.trust_mm_processor_kwargs)
        parts = list(shape.parts(body))
        if parts and not self._settings.enable_multimodal:
            first = parts[0][0]
            raise MultimodalDisabled("this server takes no media; start it with --enable-multimodal", param=first)
        found = [(part, shape.read(path, part)) for path, part in parts]
        self._check_number([medium for _, medium in found])
        # Who asks for a KV cache of its own has names of its own for its media, too: the encoder's cache goes by them.
        salt = body.get("cache_salt")
        salts = [tenant, salt if isinstance(salt, str) else ""]
        naming = Naming(json.dumps(salts) if any(salts) else "", kwargs)
        admission = Admission(self._sources, shape, naming)
        try:
            await admission.enter(found)
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


def _check_uuids(found: _Found, taken: dict[_Key, Taken]) -> None:
    """A uuid that comes with two media means neither of them."""
    named: dict[str, str] = {}
    for _, medium in found:
        identity = taken[_key(medium)].ref.identity
        if medium.uuid is not None and named.setdefault(medium.uuid, identity) != identity:
            raise MediaRefused("this uuid came with another medium in the same request", param=medium.param)


def _too_many(what: str, first: Medium, setting: str, allowed: int) -> MediaRefused:
    return MediaRefused(f"more {what} than media.{setting} allows ({allowed})", param=first.param)


def _refuse_internal(fields: dict[str, Any], path: str) -> None:
    for name in INTERNAL_FIELDS:
        # Clients that send every field they know send null.
        if fields.pop(name, None) is not None:
            raise InvalidRequest(f"{name} is not taken from clients", param=f"{path}{name}")
