"""Who may do what changes the cluster for everybody."""

from __future__ import annotations

import re
from ipaddress import ip_address

from fastapi import Request

from app.errors.requests import AdminKeyNeeded

#: Headers that a browser's script, or a proxy in between, adds.
OF_OTHERS = ("origin", "forwarded", "x-forwarded-for", "x-real-ip", "via")
#: What a program on this host calls it. A proxy that passes its own clients' name on, and a page whose name was made to
#: stand for this host (DNS rebinding), have another.
HERE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE | re.ASCII)


def required(request: Request) -> None:
    """A dependency of routes for administrators: whoever sends `api.admin_key`.

    Where neither that nor any other key is set, a client on this host may, as it may do everything else; not a web page
    in its browser, nor whoever comes through a proxy that can be told from one. Raises AdminKeyNeeded.
    """
    if request.state.admin or (request.state.keyless and _is_here(request)):
        return
    raise AdminKeyNeeded("this needs the server's admin key: the setting api.admin_key (TRIVET_API__ADMIN_KEY)")


def _is_here(request: Request) -> bool:
    """Whether the request comes straight from a program on this host, as far as can be seen: a proxy here that names
    this host, and nobody else, looks the same."""
    if request.client is None or any(name in request.headers for name in OF_OTHERS):
        return False
    if HERE.fullmatch(request.headers.get("host", "")) is None:
        return False
    try:
        return ip_address(request.client.host).is_loopback
    except ValueError:
        return False
