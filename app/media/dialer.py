"""How a media host is dialled: its name is resolved once, and what was checked is what gets the connection.

The seam is httpcore's network backend, which has nothing between it and the socket: the Host header, TLS's server name
and its certificate go by the name, the connection goes to the address.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import httpcore

from app.errors.media import MediaUnreachable
from app.media.addresses import Address, AddressPolicy
from app.media.url_policy import closed_address

log = logging.getLogger(__name__)

#: Look-ups at once. A C library that waits for a dead name server can't be interrupted, and must not keep threads that
#: others need.
RESOLVER_THREADS = 8
#: Addresses of one host that are tried.
MAX_TRIED = 4

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


class Resolver:
    """The C library's look-up, in threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="media-dns")

    async def __call__(self, host: str, port: int) -> list[Address]:
        """All addresses of the host, in the order in which to try them. Raises OSError when it has none."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _look_up, host, port)
        return list(dict.fromkeys(ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedDialer(httpcore.AsyncNetworkBackend):
    """Opens connections to hosts whose addresses the policy allows, and to no others.

    A host with several addresses is refused if one of them is closed: nothing honest has a public and a private
    address under one name, and which of them a name server gives, an attacker may choose.
    """

    def __init__(
        self, policy: AddressPolicy, resolve: Resolve, dial: httpcore.AsyncNetworkBackend | None = None
    ) -> None:
        self._policy = policy
        self._resolve = resolve
        self._dial = dial or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (httpcore's)
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """A connection, within `timeout` seconds. Raises MediaUrlRefused or MediaUnreachable."""
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._addresses(host, port)
                return await self._first(addresses[:MAX_TRIED], port, limit_s=timeout)
        except TimeoutError:
            raise MediaUnreachable(
                f"no connection to the URL's host within media_urls.connect_timeout_s ({timeout:g} s)"
            ) from None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> Sequence[Address]:
        """Those of the host, each of which may be dialled."""
        try:
            found: Sequence[Address] = [ip_address(host)]
        except ValueError:
            try:
                found = await self._resolve(host, port)
            except OSError:
                raise MediaUnreachable("the URL's host name has no address") from None
        closed = [address for address in found if not self._policy.allows(address)]
        if closed:
            log.warning("media are not fetched from %s: its address %s is closed", host, closed[0])
            raise closed_address()
        return found

    async def _first(
        self, addresses: Sequence[Address], port: int, *, limit_s: float | None
    ) -> httpcore.AsyncNetworkStream:
        """A connection to the first that answers; each gets an equal part of the time."""
        share = None if limit_s is None else limit_s / max(len(addresses), 1)
        for address in addresses:
            try:
                return await self._dial.connect_tcp(str(address), port, timeout=share)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                log.info("a media host does not answer at %s port %d: %s", address, port, type(error).__name__)
        raise MediaUnreachable("the URL's host takes no connection")


def _look_up(host: str, port: int) -> list[tuple[object, object, object, object, tuple[object, ...]]]:
    return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
