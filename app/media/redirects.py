"""Where a URL leads: each hop is checked before anybody is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpcore

from app.errors.media import MediaUrlRefused
from app.media import response as answer
from app.media.url_policy import MediaUrl, UrlPolicy

MAX_REDIRECTS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})


async def follow(
    policy: UrlPolicy, url: MediaUrl, ask: Callable[[MediaUrl], Awaitable[httpcore.Response]]
) -> tuple[MediaUrl, httpcore.Response]:
    """The end of all redirects, and the answer there, to be closed. Raises MediaUrlRefused, and what `ask` does."""
    for _ in range(1 + MAX_REDIRECTS):
        response = await ask(url)
        if response.status not in REDIRECTS:
            return url, response
        location = answer.header(response, "location") or ""
        await response.aclose()
        url = policy.follow(url, location)
    raise MediaUrlRefused(f"the URL leads through more than {MAX_REDIRECTS} redirects")
