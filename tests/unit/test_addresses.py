"""app.media.addresses: what may be dialled."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.media.addresses import AddressPolicy

CLOSED = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.19.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:c0a8:101::1",
    "3fff::1",
    "4000::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]
OPEN = ["1.1.1.1", "93.184.215.14", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::1.1.1.1"]


@pytest.mark.parametrize("text", CLOSED)
def test_closed(text: str) -> None:
    assert not AddressPolicy().allows(ip_address(text))


@pytest.mark.parametrize("text", [*OPEN, "::ffff:1.1.1.1"])
def test_open(text: str) -> None:
    assert AddressPolicy().allows(ip_address(text))


@given(st.ip_addresses(v=4))
def test_no_ipv4_address_is_open_that_python_calls_local(address: IPv4Address) -> None:
    """Hypothesis draws from the special-purpose networks on purpose."""
    closed = not address.is_global or address.is_multicast or address.is_reserved
    assert not (closed and AddressPolicy().allows(address))


@given(st.ip_addresses(v=6))
def test_no_ipv6_address_is_open_that_python_calls_local(address: IPv6Address) -> None:
    inner = address.ipv4_mapped
    closed = not address.is_global or address.is_multicast or address.is_site_local
    if inner is None:
        assert not (closed and AddressPolicy().allows(address))
    else:
        assert AddressPolicy().allows(address) == AddressPolicy().allows(inner)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_within_an_ipv6_address_is_no_way_around(address: IPv4Address) -> None:
    expected = AddressPolicy().allows(address)
    for prefix in ("::ffff:0:0", "64:ff9b::"):
        assert AddressPolicy().allows(IPv6Address(int(IPv6Address(prefix)) | int(address))) == expected
    for wrapped in (int(address), 0x2002 << 112 | int(address) << 80, 0x20010000 << 96 | (int(address) ^ 0xFFFFFFFF)):
        assert not AddressPolicy().allows(IPv6Address(wrapped))


def test_allowed_networks_are_open_and_no_others() -> None:
    policy = AddressPolicy([ip_network("127.0.0.0/8"), ip_network("fd00:1::/32"), ip_network("2002::/16")])
    for text in ("127.0.0.1", "127.9.9.9", "::ffff:127.0.0.1", "fd00:1::5", "2002:7f00:1::", "1.1.1.1"):
        assert policy.allows(ip_address(text)), text
    for text in ("10.0.0.1", "::1", "fd00:2::5", "169.254.169.254", "::ffff:10.0.0.1"):
        assert not policy.allows(ip_address(text)), text
