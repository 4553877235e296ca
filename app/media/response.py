"""A media host's answer: what may be in it, and how much of it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime

import httpcore

from app.errors.media import MediaRefused, MediaTooLarge, MediaUnreachable

#: Servers that know nothing better say so of any file.
UNKNOWN_TYPES = frozenset({"", "application/octet-stream", "binary/octet-stream"})
MEDIA = frozenset({"image", "video", "audio"})
DOCUMENTS = ("html", "xml", "json", "javascript", "pdf")
#: A validator is the server's text, and kept in Redis.
MAX_VALIDATOR = 512
#: Each piece of a body costs the event loop some 30 microseconds, however small it is. So many may be of any size; the
#: others have to have so many bytes on average, which is less than networks make of any stream.
PIECES, PIECE = 1000, 512
#: Pieces that may be here already, and are taken before everything else gets a turn.
AT_ONCE = 32
#: Joining so much at once takes a while, and bytes.join lets other threads run meanwhile.
JOINED_IN_A_THREAD = 1 << 20


@dataclass(frozen=True)
class Validators:
    """What a host can be asked with whether a medium has changed."""

    etag: str | None = None
    last_modified: str | None = None


def header(response: httpcore.Response, name: str) -> str | None:
    """A header's value; the first, if there are several."""
    wanted = name.lower().encode()
    return next((value.decode("latin-1").strip() for key, value in response.headers if key.lower() == wanted), None)


def validators(response: httpcore.Response) -> Validators:
    """Those that the same URL's next answer can be told by.

    A Last-Modified counts from one second before Date on: in that second the medium may have changed again (RFC 9110,
    8.8.2.2).
    """
    etag, modified, date = (_kept(header(response, name)) for name in ("etag", "last-modified", "date"))
    return Validators(etag, modified if modified and _is_settled(modified, date) else None)


def media_type(response: httpcore.Response, accept: str) -> str:
    """In lower case and without parameters. Raises MediaRefused for what can't be a medium of the kinds in `accept`."""
    found = (header(response, "content-type") or "").partition(";")[0].strip().lower()
    kind, _, name = found.partition("/")
    if found in UNKNOWN_TYPES:
        return found
    if kind == "application":
        wrong = any(one in name for one in DOCUMENTS)
    else:
        wrong = kind not in MEDIA or not _is_accepted(found, accept)
    if wrong:
        raise MediaRefused("the URL's host gave another type of content than the part is for")
    return found


async def body(response: httpcore.Response, max_bytes: int) -> bytes:
    """At most `max_bytes` of it.

    Raises MediaTooLarge, MediaUnreachable for one in crumbs, and MediaRefused for one that is empty or compressed.
    """
    if (coding := header(response, "content-encoding")) and coding.lower() != "identity":
        raise MediaRefused("the URL's host compressed the medium, although it was asked not to")
    length = header(response, "content-length")
    if length is not None and length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.aiter_stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if len(chunks) > PIECES + size // PIECE:
            raise MediaUnreachable("the URL's host sends the medium in pieces that are too small")
        if not len(chunks) % AT_ONCE:
            await asyncio.sleep(0)
    if not size:
        raise MediaRefused("the URL's host gave an empty body")
    return await asyncio.to_thread(b"".join, chunks) if size > JOINED_IN_A_THREAD else b"".join(chunks)


def _is_accepted(found: str, accept: str) -> bool:
    return any(one in ("*/*", found, f"{found.partition('/')[0]}/*") for one in _ranges(accept))


def _ranges(accept: str) -> Iterable[str]:
    return (one.partition(";")[0].strip().lower() for one in accept.split(","))


def _kept(value: str | None) -> str | None:
    return value if value and len(value) <= MAX_VALIDATOR else None


def _is_settled(modified: str, date: str | None) -> bool:
    try:
        return date is None or parsedate_to_datetime(date) - parsedate_to_datetime(modified) >= timedelta(seconds=1)
    except (TypeError, ValueError):
        return False


def _too_large(max_bytes: int) -> MediaTooLarge:
    return MediaTooLarge(f"larger than media.max_item_mb allows ({max_bytes / 1e6:g} MB)")
