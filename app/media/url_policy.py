"""The policy on media URLs: taken apart and checked once, before anything is resolved or dialled.

There is one parser, and it is strict. What it makes of a URL is what gets dialled: nothing behind it reads the URL's
text again, so no two readings of one URL can differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import quote, urljoin

import idna

from app.errors.media import MediaUrlRefused
from app.media.addresses import Address, AddressPolicy
from app.settings import SettingsError
from app.settings_media import MediaUrlSettings

MAX_LENGTH = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
#: RFC 3986, appendix B, for URLs with an authority.
_URL = re.compile(r"(?P<scheme>[^:]+)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?(?:#.*)?")
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*")
#: What RFC 3986 has in no URL and others read as they like: browsers drop tabs and newlines, and take \ for /.
_AMBIGUOUS = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")
#: A host whose last label looks like a number is an IPv4 address to the C library: 127.1, 2130706433, 0x7f.1.
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
_PATH_SAFE, _QUERY_SAFE = "/%:@!$&'()*+,;=~", "/%:@!$&'()*+,;=~?[]"
#: Names that only mean something inside a network: what a proxy would resolve them to is not for clients to reach.
_INNER = (".localhost", ".local", ".internal", ".home.arpa")


@dataclass(frozen=True)
class MediaUrl:
    """An http or https URL in parts. `host` is ASCII, in lower case and without brackets; `target` path and query.

    `address` is given where the host is one.
    """

    scheme: str
    host: str
    port: int
    target: str
    address: Address | None = None

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


class UrlPolicy:
    """What `media_urls` allows. All else is refused with MediaUrlRefused, whose message repeats nothing of the URL."""

    def __init__(self, limits: MediaUrlSettings) -> None:
        self.addresses = AddressPolicy(limits.allow_private)
        self._limits = limits
        self._allowed = _patterns("allowed_media_domains", limits.allowed_media_domains)
        self._denied = _patterns("denied_media_domains", limits.denied_media_domains)

    def check(self, text: str) -> MediaUrl:
        """The URL in parts, if it may be fetched as far as that can be told without resolving its host."""
        url = _parse(text)
        if url.scheme not in self._limits.schemes:
            raise MediaUrlRefused(f"the URL's scheme is not in media_urls.schemes ({_listed(self._limits.schemes)})")
        if not self._limits.allowed_ports & {"any", str(url.port)}:
            raise MediaUrlRefused(
                f"the URL's port is not in media_urls.allowed_ports ({_listed(self._limits.allowed_ports)})"
            )
        self._check_host(url)
        return url

    def follow(self, url: MediaUrl, location: str) -> MediaUrl:
        """Where a redirect of `url` leads, if that may be fetched."""
        if not self._limits.allow_redirects:
            raise MediaUrlRefused("the URL is a redirect, and media_urls.allow_redirects is off")
        try:
            _refuse_ambiguous(location)
            # Whatever urljoin makes of it is parsed and checked as a URL from outside is.
            found = self.check(urljoin(str(url), location))
        except MediaUrlRefused as error:
            raise MediaUrlRefused(f"a redirect of the URL is refused: {error.message}") from None
        except ValueError:
            raise MediaUrlRefused("a redirect of the URL leads to something that is no URL") from None
        if url.scheme == "https" and found.scheme != "https":
            raise MediaUrlRefused("a redirect of the URL leads from https to http")
        return found

    def _check_host(self, url: MediaUrl) -> None:
        if _matches(url.host, self._denied):
            raise MediaUrlRefused("the URL's host is in media_urls.denied_media_domains")
        if self._allowed and not _matches(url.host, self._allowed):
            raise MediaUrlRefused("the URL's host is not in media_urls.allowed_media_domains")
        if url.address is not None and not self.addresses.allows(url.address):
            raise closed_address()
        if self._limits.proxy_url is not None:
            self._check_for_proxy(url)

    def _check_for_proxy(self, url: MediaUrl) -> None:
        if isinstance(url.address, IPv6Address):
            raise MediaUrlRefused("the URL's host is an IPv6 address, which is not fetched through a proxy")
        inner = url.address is None and ("." not in url.host or url.host.endswith(_INNER))
        if inner and not _matches(url.host, self._allowed):
            raise MediaUrlRefused("the URL's host is a local name; media_urls.allowed_media_domains can allow it")


def scheme(text: str) -> str:
    """In lower case; "" where there is none."""
    found = _SCHEME.match(text)
    return found[1].lower() if found else ""


def closed_address() -> MediaUrlRefused:
    """The refusal of an address, without the address: what a name resolves to is nobody's business."""
    return MediaUrlRefused(
        "the URL's host has a private, local or reserved address; media_urls.allow_private can allow its network"
    )


def _parse(text: str) -> MediaUrl:
    if len(text) > MAX_LENGTH:
        raise MediaUrlRefused(f"the URL is longer than {MAX_LENGTH} characters")
    _refuse_ambiguous(text)
    if scheme(text) not in DEFAULT_PORTS:
        raise MediaUrlRefused("the URL's scheme must be http, https, data or file")
    parts = _URL.fullmatch(text)
    if parts is None:
        raise MediaUrlRefused("the URL has no host")
    if "@" in parts["authority"]:
        raise MediaUrlRefused("the URL must not have a user or a password")
    authority = _AUTHORITY.fullmatch(parts["authority"])
    if authority is None:
        raise MediaUrlRefused("the URL's host or port is not valid")
    host, address = _host(authority["host"])
    port = int(authority["port"] or DEFAULT_PORTS[scheme(text)])
    if not 1 <= port <= 65535:
        raise MediaUrlRefused("the URL's port is not valid")
    target = quote(parts["path"], safe=_PATH_SAFE) or "/"
    if parts["query"]:  # an empty one is none, as the parsers of others have it
        target += "?" + quote(parts["query"], safe=_QUERY_SAFE)
    return MediaUrl(scheme(text), host, port, target, address)


def _host(text: str) -> tuple[str, Address | None]:
    """The host in its one normal form, and its address if it is one."""
    if text.startswith("["):
        try:
            address = IPv6Address(text[1:-1])
        except AddressValueError:
            raise MediaUrlRefused("the URL's host is no IPv6 address") from None
        return str(address), address
    name = _ascii(text).removesuffix(".")
    if not _NAME.fullmatch(name):
        raise MediaUrlRefused("the URL's host name is not valid")
    if not _ENDS_IN_NUMBER.fullmatch(name):
        return name, None
    try:
        return name, IPv4Address(name)
    except AddressValueError:
        raise MediaUrlRefused("the URL's host is a number; an IPv4 address has four numbers from 0 to 255") from None


def _ascii(name: str) -> str:
    if name.isascii():
        return name.lower()
    try:
        # Full-width digits and dots become plain ones here, before anything looks at them.
        mapped = idna.uts46_remap(name, std3_rules=False)
        return mapped if mapped.isascii() else idna.encode(mapped).decode("ascii")
    except (idna.IDNAError, IndexError):
        raise MediaUrlRefused("the URL's host name is not valid") from None


def _refuse_ambiguous(text: str) -> None:
    if _AMBIGUOUS.search(text):
        raise MediaUrlRefused("the URL has a control character, a line break or a backslash in it")


def _patterns(name: str, texts: Iterable[str]) -> frozenset[str]:
    """Hosts in their normal form; `.example.com` stands for all below it."""
    found = set()
    for text in texts:
        below, host = ("*." if text.startswith("*.") else ""), text.removeprefix("*.")
        try:
            found.add(below.removeprefix("*") + _host(host)[0])
        except MediaUrlRefused:
            raise SettingsError(f"media_urls.{name}: {text!r} is no host") from None
    return frozenset(found)


def _matches(host: str, patterns: frozenset[str]) -> bool:
    return host in patterns or any(one.startswith(".") and host.endswith(one) for one in patterns)


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(values, key=lambda one: (len(one), one)))
