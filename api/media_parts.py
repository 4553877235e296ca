"""Where media lie in the body of each API, and how a reference takes the place of one.

A shape yields whatever is not plain text, known or not: what an endpoint does not take is refused, never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from app.errors.media import MediaRefused
from app.errors.requests import InvalidRequest
from app.messages.media import Modality

Part = dict[str, Any]

#: Content parts with a medium, and its kind. The part has the medium under the same name.
MEDIA_PARTS: dict[str, Modality] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
#: What OpenAI's `input_audio` may say that its data are. The data themselves tell in the end.
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")
#: Content parts that hold no media.
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
#: Embeddings that a client made: of the wrong shape they end an engine, and nothing tells whose they are.
EMBEDS = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
#: What vLLM's chat parser may take for a medium, whatever the part says that it is.
MEDIA_FIELDS = EMBEDS | {"image_url", "video_url", "audio_url", "input_audio", "input_image", "image_pil"}

#: A client's own name for a medium.
UUID = re.compile(r"[!-~]{1,128}")


class Medium(NamedTuple):
    """What a client sent: a URL, or a `uuid` of its own for a medium that it sent before, or both, to name it so.

    `param` is the field that has it. Of a data: URL, `payload` may be what follows its comma, and not in `url`.
    """

    url: str | None
    modality: Modality
    param: str
    uuid: str | None = None
    payload: memoryview | None = None


class Shape(Protocol):
    """One API's way to write media."""

    def parts(self, body: dict[str, Any]) -> Iterator[tuple[str, Part]]:
        """(path, part) of every part that is not text. Wrong shapes are left to the request model."""

    def read(self, path: str, part: Part) -> Medium:
        """Raises MediaRefused when the part is none that the endpoint takes."""

    def write(self, part: Part, url: str) -> None:
        """Leave nothing in the part but the reference."""


class ChatParts:
    """`messages[].content[]` of `image_url`, `video_url`, `audio_url` and `input_audio` parts."""

    def parts(self, body: dict[str, Any]) -> Iterator[tuple[str, Part]]:
        for path, message in _objects(body.get("messages"), "messages"):
            for at, part in _objects(message.get("content"), f"{path}.content"):
                if _is_media(part, at, MEDIA_PARTS):
                    yield at, part

    def read(self, path: str, part: Part) -> Medium:
        kind = part["type"]
        modality = MEDIA_PARTS.get(kind)
        if modality is None:
            raise _unsupported(path, MEDIA_PARTS)
        given, param = part.get(kind), f"{path}.{kind}"
        url = given.get("url") if isinstance(given, dict) else given
        if kind == "input_audio":
            url = None if given is None else _audio_url(given, param)
        uuid = _uuid(part, path)
        if url is None and uuid is not None:
            return Medium(None, modality, param, uuid)
        if not isinstance(url, str):
            raise MediaRefused(f"{kind} needs a url, or null and the uuid of one sent before", param=param)
        return Medium(url, modality, param, uuid)

    def write(self, part: Part, url: str) -> None:
        kind = "audio_url" if part["type"] == "input_audio" else part["type"]
        part.clear()
        part.update({"type": kind, kind: {"url": url}})


class ResponsesParts:
    """`input_image` parts, in the content of `input[]` messages and in the output of tools."""

    #: Kinds of the parts, and where they may have a URL.
    kinds: dict[str, Modality] = {"input_image": "image"}
    #: What `input[]` may have: other kinds are the work of tools that this server doesn't have.
    items = frozenset(
        {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
    )
    texts = TEXT_PARTS | {"reasoning_text", "summary_text"}

    def parts(self, body: dict[str, Any]) -> Iterator[tuple[str, Part]]:
        for path, item in _objects(body.get("input"), "input"):
            if item.get("type") not in (None, *self.items):
                raise InvalidRequest("this kind of input item is not supported", param=f"{path}.type")
            for name in ("content", "output"):
                for at, part in _objects(item.get(name), f"{path}.{name}"):
                    if _is_media(part, at, self.kinds, texts=self.texts, fields=frozenset({"image_url"})):
                        yield at, part

    def read(self, path: str, part: Part) -> Medium:
        modality = self.kinds.get(part["type"])
        if modality is None:
            raise _unsupported(path, self.kinds)
        url, param, uuid = part.get("image_url"), f"{path}.image_url", _uuid(part, path)
        if url is None and uuid is not None:
            return Medium(None, modality, param, uuid)
        if not isinstance(url, str):
            raise MediaRefused(
                "input_image needs an image_url, or null and the uuid of one sent before (files are not kept here)",
                param=param,
            )
        return Medium(url, modality, param, uuid)

    def write(self, part: Part, url: str) -> None:
        part.clear()
        part.update({"type": "input_image", "image_url": url, "detail": "auto"})


class MessagesParts:
    """Anthropic's `image` blocks, in messages and in the results of tools."""

    texts = frozenset(
        {"text", "tool_use", "tool_reference", "thinking", "redacted_thinking", "tool_addition", "tool_removal"}
    )

    def parts(self, body: dict[str, Any]) -> Iterator[tuple[str, Part]]:
        for at, block in _objects(body.get("system"), "system"):
            if block.get("type") != "text":
                raise MediaRefused("the system prompt can only be text", param=at)
        for path, message in _objects(body.get("messages"), "messages"):
            yield from self._blocks(message.get("content"), f"{path}.content", message.get("role"))

    def _blocks(self, blocks: Any, path: str, role: Any) -> Iterator[tuple[str, Part]]:
        for at, block in _objects(blocks, path):
            if block.get("type") == "tool_result":
                yield from self._blocks(block.get("content"), f"{at}.content", role)
            elif _is_media(block, at, {"image": "image"}, texts=self.texts, fields=frozenset()):
                if role != "user":  # elsewhere vLLM passes over it
                    raise MediaRefused("only messages of the user can have images", param=at)
                yield at, block

    def read(self, path: str, part: Part) -> Medium:
        source = part.get("source") if part["type"] == "image" else None
        if part["type"] != "image":
            raise _unsupported(path, {"image": "image"})
        if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
            raise MediaRefused("an image needs a source of type base64 or url", param=f"{path}.source")
        url = source.get("url") if source["type"] == "url" else _data_url(source)
        if not isinstance(url, str):
            raise MediaRefused("the image's source has no data", param=f"{path}.source")
        return Medium(url, "image", f"{path}.source")

    def write(self, part: Part, url: str) -> None:
        part.clear()
        part.update({"type": "image", "source": {"type": "url", "url": url}})


class NoParts:
    """A body without a place for media."""

    def parts(self, body: dict[str, Any]) -> Iterator[tuple[str, Part]]:
        yield from ()

    def read(self, path: str, part: Part) -> Medium:
        raise AssertionError("no part to read")

    def write(self, part: Part, url: str) -> None:
        raise AssertionError("no part to write")


CHAT, RESPONSES, MESSAGES, NONE = ChatParts(), ResponsesParts(), MessagesParts(), NoParts()


def _objects(found: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for at, one in enumerate(found if isinstance(found, list) else []):
        if isinstance(one, dict):
            yield f"{path}[{at}]", one


def _is_media(
    part: Part,
    path: str,
    kinds: dict[str, Modality],
    *,
    texts: frozenset[str] = TEXT_PARTS,
    fields: frozenset[str] = frozenset(),
) -> bool:
    """`fields`: further places where a part with a medium may have it."""
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest("a content part needs a type", param=f"{path}.type")
    if kind in EMBEDS:
        raise MediaRefused("embeddings are not taken from clients; send the medium itself", param=f"{path}.{kind}")
    if kind not in texts and kind not in kinds:
        return True  # to be refused, whatever is in it
    allowed = {kind, *fields} if kind in kinds else {kind}
    others = sorted(MEDIA_FIELDS & part.keys() - allowed)
    # A body may be looked through more than once: one that is refused is left as it was.
    for name in others:
        if part[name] is not None:
            raise MediaRefused(f"a content part of type {kind} cannot have this field", param=f"{path}.{name}")
    for name in others:
        del part[name]
    return kind in kinds


def _unsupported(path: str, kinds: dict[str, Modality]) -> MediaRefused:
    *others, last = kinds
    known = f"{', '.join(others)} and {last}" if others else last
    return MediaRefused(
        f"this kind of content part is not supported; {known} {'are' if len(kinds) > 1 else 'is'}", param=path
    )


def _uuid(part: Part, path: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and UUID.fullmatch(uuid)):
        raise InvalidRequest("a uuid is 1 to 128 printable ASCII characters without spaces", param=f"{path}.uuid")
    return uuid


def _audio_url(given: Any, param: str) -> str:
    data, kind = (given.get("data"), given.get("format")) if isinstance(given, dict) else (None, None)
    if not isinstance(data, str) or kind not in AUDIO_FORMATS:
        raise MediaRefused(
            f"input_audio needs data (base64) and a format: {', '.join(AUDIO_FORMATS[:-1])} or {AUDIO_FORMATS[-1]}",
            param=param,
        )
    return f"data:audio/{kind};base64,{data}"


def _data_url(source: dict[str, Any]) -> str | None:
    data, media_type = source.get("data"), source.get("media_type", "image/jpeg")
    if not isinstance(data, str) or not isinstance(media_type, str):
        return None
    return f"data:{media_type};base64,{data}"
