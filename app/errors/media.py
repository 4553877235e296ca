"""Media that are refused, cannot be had, or have no room."""

from __future__ import annotations

from app.errors.base import TrivetError
from app.errors.requests import InvalidRequest


class MediaRefused(InvalidRequest):
    """A media part that is not allowed, not supported, or not what it claims to be."""

    code = "invalid_media"


class MediaTooLarge(MediaRefused):
    """A medium has more bytes than `media.max_item_mb`."""

    code = "media_too_large"


class MediaUrlRefused(MediaRefused):
    """The policy on media URLs (`media_urls`) does not let this one be fetched, or a redirect of it be followed."""

    code = "media_url_refused"


class MediaUnreachable(MediaRefused):
    """The media host did not give the medium: no address, no connection, not in time, or another answer.

    A client's fault like the others: a status that says "try again" would send every dead link three times.
    """

    code = "media_unreachable"


class MediaUuidNotFound(MediaRefused):
    """A part has no medium but a client's name for one, and nobody knows the name, or has the medium any more."""

    code = "media_uuid_not_found"


class MediaUuidTaken(MediaRefused):
    """A client's name for a medium came with another medium, and `media.rebind_uuids` is off."""

    code = "media_uuid_taken"


class MediaExpired(TrivetError):
    """Neither a medium's bytes nor its embedding are where they were when the request came.

    Of a medium that this request brought itself, its time was up. One that was only referred to is got again.
    """

    status = 503
    code = "media_expired"
    retry_after_s = 1


class MediaMemoryFull(TrivetError):
    """The API process holds as many media bytes as its settings allow."""

    status = 503
    code = "media_memory_full"
    retry_after_s = 1


class MediaFetchesBusy(TrivetError):
    """As many media are being fetched as `media_urls.max_concurrent_fetches` allows, and none of them ended in time."""

    status = 503
    code = "media_fetches_busy"
    retry_after_s = 1
