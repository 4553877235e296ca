"""Which network devices UCX may use for an address: what others reach this process at, and nothing else."""

from __future__ import annotations

import ipaddress
import logging
import socket
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_INFINIBAND = Path("/sys/class/infiniband")
_LOOPBACK = "lo"


def of(host: str) -> str | None:
    """UCX's NET_DEVICES for an address or a name of this host; None, which is all devices, where UCX has to choose.

    That is on hosts with RDMA devices, which UCX knows by other names and which may be several for one address, and
    where the address is no interface's. Blocks while it looks a name up.
    """
    if _loopback(host):
        return _LOOPBACK
    if _has_rdma():
        log.info("tensors.host=%s: UCX chooses among this host's network and RDMA devices", host)
        return None
    found = _interfaces(_addresses(host))
    if not found:
        log.warning("tensors.host=%s is no address of this host's interfaces: NIXL uses all of them", host)
        return None
    return ",".join(found)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses(host: str) -> set[str]:
    """Not those on loopback: a host often has its own name there, for itself alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {one for *_, address in found if not _loopback(one := str(address[0]).partition("%")[0])}


def _interfaces(addresses: set[str]) -> list[str]:
    """Names as UCX has them: that of an alias (`eth0:1`) is the interface's."""
    return sorted(
        {
            name.partition(":")[0]
            for name, own in psutil.net_if_addrs().items()
            if any(one.address.partition("%")[0] in addresses for one in own)
        }
    )


def _has_rdma() -> bool:
    try:
        return any(_INFINIBAND.iterdir())
    except OSError:
        return False
