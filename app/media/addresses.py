"""Which addresses media may be fetched from: public ones, and those that the operator allows.

The networks are those of IANA's special-purpose address registries (RFC 6890 and its successors) that are not for the
public internet, multicast, and where clouds keep their metadata services.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_CLOSED_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this host; Linux takes 0.0.0.0 for loopback
            "10.0.0.0/8",
            "100.64.0.0/10",  # carriers' NAT, and Alibaba Cloud's metadata
            "127.0.0.0/8",
            "168.63.129.16/32",  # Azure's host services, in a public network
            "169.254.0.0/16",  # link-local, and with it most clouds' metadata
            "172.16.0.0/12",
            "192.0.0.0/24",  # protocol assignments, and Oracle Cloud's metadata
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
#: All other IPv6 addresses are loopback, local, multicast, unassigned, or hold an IPv4 address.
_UNICAST_V6 = IPv6Network("2000::/3")
_CLOSED_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments, Teredo among them
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation
        ),
    )
)
#: Networks whose addresses end in an IPv4 address, which is the one that is reached: IPv4-mapped, NAT64 (RFC 6052).
_WRAPPERS = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))


class AddressPolicy:
    """`allowed` networks may be dialled although they are closed to others."""

    def __init__(self, allowed: Iterable[Network] = ()) -> None:
        self._allowed = tuple(allowed)

    def allows(self, address: Address) -> bool:
        """Whether a connection to the address may be opened."""
        reached = _reached(address)
        return not _is_closed(reached) or any(one in network for network in self._allowed for one in (address, reached))


def _reached(address: Address) -> Address:
    if isinstance(address, IPv6Address) and any(address in wrapper for wrapper in _WRAPPERS):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_closed(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return any(address in network for network in _CLOSED_V4)
    return address not in _UNICAST_V6 or any(address in network for network in _CLOSED_V6)
