"""`https://` URLs of archives: fetched under the policy for media URLs, and unpacked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpcore

from app.adapters.base import AdapterRefused, AdapterUnreachable
from app.adapters.intake import Intake
from app.adapters.limits import STALL_S, Limits, Meter
from app.adapters.unpacking import unpack
from app.errors.media import MediaUnreachable, MediaUrlRefused
from app.media import response as answer
from app.media.connections import get, open_pool
from app.media.dialer import CheckedDialer, Resolver
from app.media.fetch import FAULTS, USER_AGENT
from app.media.redirects import follow
from app.media.url_policy import MediaUrl, UrlPolicy
from app.settings_media import MediaUrlSettings

log = logging.getLogger(__name__)


class ArchiveSource:
    """Raises AdapterRefused for a URL that `urls` does not let be fetched. No message repeats it: it may be signed."""

    def __init__(self, source: str, urls: MediaUrlSettings) -> None:
        self._urls, self._policy = urls, UrlPolicy(urls)
        try:
            self._url = self._policy.check(source)
        except MediaUrlRefused as error:
            raise AdapterRefused(error.message) from None

    def take(self, intake: Intake) -> None:
        packed = intake.scratch / "archive"
        # This thread has no event loop of its own, and what the policy dials with needs one.
        asyncio.run(self._download(packed, intake.limits))
        unpack(packed, intake)

    async def _download(self, into: Path, limits: Limits) -> None:
        try:
            async with asyncio.timeout(limits.left_s), self._answer() as response:
                await _save(response, into, limits)
        except MediaUrlRefused as error:
            raise AdapterRefused(error.message) from None
        except MediaUnreachable as error:
            raise AdapterUnreachable(error.message) from None
        except TimeoutError:
            limits.check()
            raise AdapterUnreachable(f"the URL's host was silent for {STALL_S:g} s") from None
        except FAULTS as error:
            log.warning("an archive does not come from %s: %s", self._url.host, error)
            raise AdapterUnreachable(
                f"the URL's host takes no connection, or broke its answer off ({type(error).__name__})"
            ) from None

    @asynccontextmanager
    async def _answer(self) -> AsyncIterator[httpcore.Response]:
        resolver = Resolver()
        try:
            async with (
                open_pool(self._urls, CheckedDialer(self._policy.addresses, resolver)) as pool,
                aclosing(await self._follow(pool)) as response,
            ):
                yield response
        finally:
            resolver.close()

    async def _follow(self, pool: httpcore.AsyncConnectionPool) -> httpcore.Response:
        """The answer at the end of all redirects."""

        async def ask(url: MediaUrl) -> httpcore.Response:
            async with asyncio.timeout(STALL_S):
                return await get(pool, url, _headers(url), self._urls.connect_timeout_s)

        _, response = await follow(self._policy, self._url, ask)
        if response.status != 200:
            await response.aclose()
            raise AdapterUnreachable(f"the URL's host answered with status {response.status}")
        return response


def _headers(url: MediaUrl) -> list[tuple[str, str]]:
    return [("Host", url.authority), ("Accept", "*/*"), ("Accept-Encoding", "identity"), ("User-Agent", USER_AGENT)]


async def _save(response: httpcore.Response, into: Path, limits: Limits) -> None:
    meter = Meter(limits)
    length = answer.header(response, "content-length")
    if length is not None and length.isdecimal() and int(length) > limits.max_bytes:
        raise limits.too_large()
    stream = aiter(response.aiter_stream())
    with open(into, "xb") as file:  # noqa: ASYNC230 (the loop has nothing else to do)
        while True:
            async with asyncio.timeout(STALL_S):
                chunk = await anext(stream, b"")
            if not chunk:
                return
            meter.add(len(chunk))
            file.write(chunk)
