"""Who may do what changes the cluster for everybody."""

from __future__ import annotations

from ipaddress import ip_address

from fastapi import Request

from app.errors import AdminKeyNeeded

#: Headers that a browser's script, or a proxy in between, adds.
OF_OTHERS = ("origin", "forwarded", "x-forwarded-for", "x-real-ip", "via")


def required(request: Request) -> None:
    """A dependency of routes for administrators: whoever sends `api.admin_key`.

    Where neither that nor any other key is set, a client on this host may, as it may do everything else; not a web page
    in its browser, nor whoever comes through a proxy. Raises AdminKeyNeeded.
    """
    if request.state.admin or (request.state.keyless and _is_here(request)):
        return
    raise AdminKeyNeeded("this needs the server's admin key: the setting api.admin_key (TRIVET_API__ADMIN_KEY)")


def _is_here(request: Request) -> bool:
    """Whether the request comes straight from a program on this host."""
    if request.client is None or any(name in request.headers for name in OF_OTHERS):
        return False
    try:
        return ip_address(request.client.host).is_loopback
    except ValueError:
        return False
