"""The pool of connections to media hosts, or to the proxy in front of them."""

from __future__ import annotations

import ssl
from urllib.parse import unquote, urlsplit

import httpcore

from app.media.url_policy import MediaUrl
from app.settings import SettingsError
from app.settings_media import MediaUrlSettings

#: Shorter than what servers close idle connections after: a GET on one that is about to be closed gets lost.
KEEP_ALIVE_S = 2.0


def open_pool(limits: MediaUrlSettings, dialer: httpcore.AsyncNetworkBackend) -> httpcore.AsyncConnectionPool:
    """Connections are shared by requests to the same scheme, host and port alone, whose address was checked.

    A proxy is the operator's choice, and dialled wherever it is. Raises SettingsError for a CA bundle that is none.
    """
    most = limits.max_concurrent_fetches
    if limits.proxy_url is None:
        return httpcore.AsyncConnectionPool(
            ssl_context=_tls(limits), max_connections=most, keepalive_expiry=KEEP_ALIVE_S, network_backend=dialer
        )
    proxy = urlsplit(limits.proxy_url)
    credentials = (unquote(proxy.username), unquote(proxy.password or "")) if proxy.username else None
    return httpcore.AsyncHTTPProxy(
        proxy_url=httpcore.URL(scheme=proxy.scheme, host=proxy.hostname or "", port=proxy.port, target="/"),
        proxy_auth=credentials,
        ssl_context=_tls(limits),
        proxy_ssl_context=_tls(limits) if proxy.scheme == "https" else None,
        max_connections=most,
        keepalive_expiry=KEEP_ALIVE_S,
    )


async def get(
    pool: httpcore.AsyncConnectionPool, url: MediaUrl, headers: list[tuple[str, str]], connect_s: float
) -> httpcore.Response:
    """The answer to a GET, of which only the head has been read. Raises what httpcore and the dialer raise.

    A host may close an idle connection just as it is used again, and has then not seen the request: that one goes out
    once more (RFC 9112, 9.3.1).
    """
    dialled = False

    async def note(event: str, _: object) -> None:
        nonlocal dialled
        dialled = dialled or event == "connection.connect_tcp.complete"

    async def ask() -> httpcore.Response:
        target = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        extensions = {"timeout": {"connect": connect_s}, "trace": note}
        return await pool.handle_async_request(httpcore.Request("GET", target, headers=headers, extensions=extensions))

    try:
        return await ask()
    except (httpcore.NetworkError, httpcore.RemoteProtocolError):
        if dialled:
            raise
        return await ask()


def _tls(limits: MediaUrlSettings) -> ssl.SSLContext:
    context = httpcore.default_ssl_context()
    if limits.ca_bundle is not None:
        try:
            context.load_verify_locations(cafile=limits.ca_bundle)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"media_urls.ca_bundle: {limits.ca_bundle} is no PEM file: {error}") from None
    return context
