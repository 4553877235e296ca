"""Media from URLs: the one place of the server that opens a connection, or a file, because a client said so."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

import httpcore

from app.errors.media import MediaFetchesBusy, MediaRefused, MediaUnreachable, MediaUrlRefused
from app.media import response as answer
from app.media.connections import get, open_pool
from app.media.dialer import CheckedDialer, Resolver
from app.media.file_root import FileRoot
from app.media.redirects import follow
from app.media.response import Validators
from app.media.single_flight import SingleFlight
from app.media.url_policy import MediaUrl, UrlPolicy, scheme
from app.settings_media import MediaUrlSettings

log = logging.getLogger(__name__)

USER_AGENT = "trivet"
#: What httpcore raises; it has no class for them all.
FAULTS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError)


@dataclass(frozen=True)
class Fetched:
    """What a URL gave.

    `media_type` is in lower case, without parameters, and "" if none was sent. `etag` and `last_modified` are verbatim,
    and None after a redirect: where the URL leads next time they may be those of another medium. With `not_modified`
    the host said that nothing has changed, and there are no `data`.
    """

    data: bytes
    media_type: str
    etag: str | None
    last_modified: str | None
    not_modified: bool


@dataclass(frozen=True)
class _Question:
    """One GET, as far as it makes a difference to the answer."""

    url: MediaUrl
    accept: str
    known: Validators

    def headers(self, url: MediaUrl) -> list[tuple[str, str]]:
        """For `url`: this one, or one that it was redirected to, whose medium is another one."""
        known = self.known if url == self.url else Validators()
        named = {
            "Host": url.authority,
            "Accept": self.accept,
            "Accept-Encoding": "identity",
            "User-Agent": USER_AGENT,
            "If-None-Match": known.etag,
            "If-Modified-Since": known.last_modified,
        }
        return [(name, value) for name, value in named.items() if value is not None]


class MediaFetcher:
    """Fetches `http:`, `https:` and `file:` URLs that `limits` allow, of media up to `max_bytes`.

    Who asks for the same URL at the same time shares one GET. `counts` are by outcome: `fetched`, `not_modified`, or
    an error's code. Used on one event loop. Raises SettingsError for limits that cannot be kept. `resolver` and
    `dialer` are for those who have another network.
    """

    def __init__(
        self,
        limits: MediaUrlSettings,
        max_bytes: int,
        *,
        resolver: Resolver | None = None,
        dialer: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._limits = limits
        self._max_bytes = max_bytes
        self._policy = UrlPolicy(limits)
        self._files = FileRoot(limits.allowed_local_media_path)
        self._resolver = resolver or Resolver()
        self._pool = open_pool(limits, CheckedDialer(self._policy.addresses, self._resolver, dialer))
        self._slots = asyncio.Semaphore(limits.max_concurrent_fetches)
        self._gets: SingleFlight[_Question, Fetched] = SingleFlight()

    def check(self, url: str, param: str) -> None:
        """Raise MediaUrlRefused for a URL that `fetch` would refuse without asking anybody."""
        try:
            if scheme(url) == "file":
                self._files.check(url)
            else:
                self._policy.check(url)
        except MediaUrlRefused as error:
            raise self._of_the_part(error, param) from None

    @asynccontextmanager
    async def fetch(
        self, url: str, param: str, *, accept: str = "*/*", etag: str | None = None, last_modified: str | None = None
    ) -> AsyncIterator[Fetched]:
        """What the URL gives: a medium of one of the types in `accept`. It counts as one of the fetches that may run
        at once until the context is left: so long it takes memory.

        With `etag` or `last_modified`, as an earlier fetch of this URL gave them, the answer may be that nothing has
        changed. Raises MediaRefused (MediaUrlRefused, MediaUnreachable, MediaTooLarge among them) or MediaFetchesBusy;
        they name `param`, and no address or path.
        """
        async with AsyncExitStack() as stack:
            try:
                answer = self._fetch(url, accept, Validators(etag, last_modified))
                fetched = await stack.enter_async_context(answer)
            except (MediaRefused, MediaFetchesBusy) as error:
                raise self._of_the_part(error, param) from None
            self.counts["not_modified" if fetched.not_modified else "fetched"] += 1
            yield fetched

    async def close(self) -> None:
        """End the fetches that still run, and close all connections."""
        await self._gets.close()
        await self._pool.aclose()
        self._resolver.close()

    def _of_the_part(self, error: MediaRefused | MediaFetchesBusy, param: str) -> MediaRefused | MediaFetchesBusy:
        """The error anew: others may have got the same one, for parts of their own."""
        self.counts[error.code] += 1
        return type(error)(error.message, param=param)

    @asynccontextmanager
    async def _fetch(self, url: str, accept: str, known: Validators) -> AsyncIterator[Fetched]:
        if scheme(url) == "file":
            async with self._slot():
                async with self._in_time():
                    data = await asyncio.to_thread(self._files.read, url, self._max_bytes)
                yield Fetched(data, "", None, None, False)
            return
        question = _Question(self._policy.check(url), accept, known)
        async with self._gets.join(question, lambda: self._get(question)) as fetched:
            yield fetched

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """One of the fetches that may run at once."""
        try:
            async with asyncio.timeout(self._limits.fetch_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise MediaFetchesBusy("the server fetches as many media as it may; try again") from None
        try:
            yield
        finally:
            self._slots.release()

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """As long as a fetch may take."""
        limit_s = self._limits.fetch_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise MediaUnreachable(
                f"the medium did not come within media_urls.fetch_timeout_s ({limit_s:g} s)"
            ) from None

    @asynccontextmanager
    async def _get(self, question: _Question) -> AsyncIterator[Fetched]:
        async with self._slot():
            async with self._in_time():
                fetched = await self._found(question)
            yield fetched

    async def _found(self, question: _Question) -> Fetched:
        try:
            return await self._follow(question)
        except (*FAULTS, OSError) as error:
            log.info("a fetch from %s failed: %s", question.url.host, type(error).__name__)
            raise MediaUnreachable(_why(error)) from None

    async def _follow(self, question: _Question) -> Fetched:
        """The answer at the end of all redirects."""

        def ask(url: MediaUrl) -> Awaitable[httpcore.Response]:
            return get(self._pool, url, question.headers(url), self._limits.connect_timeout_s)

        url, response = await follow(self._policy, question.url, ask)
        async with aclosing(response):
            return await self._take(response, question, redirected=url != question.url)

    async def _take(self, response: httpcore.Response, question: _Question, *, redirected: bool) -> Fetched:
        was_asked = question.known != Validators() and not redirected
        if response.status != 200 and not (response.status == 304 and was_asked):
            raise MediaUnreachable(f"the URL's host answered with status {response.status}")
        validators = Validators() if redirected else answer.validators(response)
        if response.status == 304:
            kept = question.known if validators == Validators() else validators
            return Fetched(b"", "", kept.etag, kept.last_modified, True)
        media_type = answer.media_type(response, question.accept)
        data = await answer.body(response, self._max_bytes)
        return Fetched(data, media_type, validators.etag, validators.last_modified, False)


def _why(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return "the URL's host has no valid TLS certificate"
    if isinstance(error, (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.ProxyError)):
        return "the URL's host takes no connection"
    return "the URL's host broke its answer off, or answered with something other than HTTP"
