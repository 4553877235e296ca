"""The pool of connections to media hosts, or to the proxy in front of them."""

from __future__ import annotations

import ssl
from urllib.parse import unquote, urlsplit

import httpcore

from app.settings import SettingsError
from app.settings_sections import MediaUrlSettings

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


def _tls(limits: MediaUrlSettings) -> ssl.SSLContext:
    context = httpcore.default_ssl_context()
    if limits.ca_bundle is not None:
        try:
            context.load_verify_locations(cafile=limits.ca_bundle)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"media_urls.ca_bundle: {limits.ca_bundle} is no PEM file: {error}") from None
    return context
