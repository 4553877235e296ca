"""Media inside a request's JSON, left where they are while the rest is parsed.

Any JSON parser turns 13 MB of base64 into a string first, and keeps the event loop waiting for some 30 ms meanwhile, in
whichever thread it runs. Base64 has no quotes: its end is found in less than one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from api import media_parts
from api.media_parts import Medium, Part, Shape
from app.errors.requests import InvalidRequest

#: Shorter texts are parsed with the rest.
LARGE = 1 << 16
#: Most places in a body that are looked at. More media are never allowed, and each look takes time.
MOST = 256
#: Characters of the words that stand for payloads.
WORD = 23
#: How a string begins that is the base64 of a medium: after its `data:` head, or as the value of a `data` field.
_START = re.compile(rb'"data(?::[^"\\,]{0,200};base64,|"[ \t\r\n]*:[ \t\r\n]*")')
#: What follows a string that is a field's name.
_NAME_END = re.compile(rb"[ \t\r\n]*:")


class _Cut(NamedTuple):
    """JSON with a short word in place of each large base64 text, and these by the word that none of them has."""

    text: bytes | bytearray
    payloads: dict[str, memoryview]


class Body(NamedTuple):
    """What the JSON is, and the shape that reads its media. `text_bytes` of it are no base64 of media."""

    fields: Any
    shape: Shape
    text_bytes: int

    def forget_media(self) -> None:
        """They have been read for the last time: let go of their memory."""
        if isinstance(self.shape, Inlined):
            self.shape.payloads.clear()


class Inlined:
    """A shape for a body whose media were cut out: it reads them with their payload."""

    def __init__(self, shape: Shape, payloads: dict[str, memoryview]) -> None:
        self._shape = shape
        self.payloads = payloads

    def parts(self, body: dict[str, Any]) -> Iterator[tuple[str, Part]]:
        return self._shape.parts(body)

    def read(self, path: str, part: Part) -> Medium:
        medium = self._shape.read(path, part)
        word = "" if medium.url is None else medium.url[-WORD:]
        return medium._replace(payload=self.payloads.get(word))

    def write(self, part: Part, url: str) -> None:
        self._shape.write(part, url)


def parse(received: bytearray, shape: Shape) -> Body:
    """`shape` is that of the API's bodies. Raises orjson.JSONDecodeError."""
    if len(received) < LARGE or shape is media_parts.NONE:
        return Body(orjson.loads(received), shape, len(received))
    cut = _cut(received)
    if (found := _without_payloads(cut, shape)) is not None:
        return found
    # Nothing, or not all of it, is a medium: some may be text that looks like one. Or it is no JSON: to be told where.
    body = orjson.loads(received)
    urls = sum(len(medium.url or "") for medium in _media(body, shape) or ())
    return Body(body, shape, len(received) - urls)


def _without_payloads(cut: _Cut, shape: Shape) -> Body | None:
    if not cut.payloads:
        return None
    try:
        body, inlined = orjson.loads(cut.text), Inlined(shape, cut.payloads)
    except orjson.JSONDecodeError:
        return None
    found = _media(body, inlined)
    # A word that none of the media has stands for text. Of a body with a wrong part nobody knows.
    if found is None or sum(medium.payload is not None for medium in found) != len(cut.payloads):
        return None
    return Body(body, inlined, len(cut.text))


def _media(body: Any, shape: Shape) -> list[Medium] | None:
    """None for a body that has a wrong part."""
    try:
        return [shape.read(path, part) for path, part in shape.parts(body)] if isinstance(body, dict) else None
    except InvalidRequest:
        return None


def _cut(body: bytearray) -> _Cut:
    pieces: list[memoryview | bytes] = []
    payloads: dict[str, memoryview] = {}
    whole, nonce, kept = memoryview(body), secrets.token_hex(8), 0
    for start, end in _strings(body):
        word = f"@{nonce}{len(payloads):06x}"
        payloads[word] = whole[start:end]
        pieces += (whole[kept:start], word.encode())
        kept = end
    return _Cut(b"".join((*pieces, whole[kept:])) if payloads else body, payloads)


def _strings(body: bytearray) -> Iterator[tuple[int, int]]:
    """(start, end) of each large base64 text. None has escapes, so that each ends with the first quote.

    A quote without a backslash before it begins a string in sound JSON, or ends one, and then what comes after it, and
    is left there, is an error to any parser.
    """
    at = 1
    for _ in range(MOST):
        at = body.find(b'"data', at)
        if at < 0:
            return
        begun = _START.match(body, at) if body[at - 1 : at] != b"\\" else None
        if begun is None:
            at += 1
            continue
        start, at = begun.end(), body.find(b'"', begun.end())
        if at < 0:
            return
        if at - start >= LARGE and body.find(b"\\", start, at) < 0 and not _NAME_END.match(body, at + 1):
            yield start, at
