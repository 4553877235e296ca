"""app.media.dialer under app.media.fetch: the address that was checked is the one that is dialled."""

import asyncio
import socket
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Any

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors.media import MediaRefused, MediaUnreachable, MediaUrlRefused
from app.media.addresses import Address, AddressPolicy
from app.media.dialer import CheckedDialer, Resolver
from app.media.fetch import MediaFetcher
from app.settings_media import MediaUrlSettings

PUBLIC, OTHER, PRIVATE = (ip_address(one) for one in ("1.1.1.1", "8.8.8.8", "10.0.0.1"))
PICTURE = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 3\r\n\r\npng"


class Names(Resolver):
    """A name server that answers differently each time, and from the end of its answers on with the last."""

    def __init__(self, *answers: Sequence[Address]) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.given: list[Sequence[Address]] = []
        self._answers = answers

    async def __call__(self, host: str, port: int) -> list[Address]:
        answer = self._answers[min(len(self.asked), len(self._answers) - 1)]
        self.asked.append(host)
        self.given.append(answer)
        if not answer:
            raise socket.gaierror("no such name")
        return [*answer]


class Network(httpcore.AsyncNetworkBackend):
    """Writes down what is dialled. Addresses in `dead` take no connection, the others answer with `answers` in turn."""

    def __init__(self, *answers: bytes, dead: Iterable[Address] = ()) -> None:
        self.dialled: list[tuple[str, int]] = []
        self._answers = list(answers)
        self._dead = {str(one) for one in dead}

    async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        self.dialled.append((host, port))
        if host in self._dead:
            raise httpcore.ConnectError("refused")
        return httpcore.AsyncMockStream([self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]])


def redirect(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


def fetch(url: str, names: Names, network: Network, **limits: Any) -> bytes | MediaRefused:
    async def run() -> bytes | MediaRefused:
        fetcher = MediaFetcher(MediaUrlSettings(**limits), 1000, resolver=names, dialer=network)
        try:
            async with fetcher.fetch(url, "messages[0]") as fetched:
                return fetched.data
        except MediaRefused as error:
            return error
        finally:
            await fetcher.close()

    return asyncio.run(run())


@given(
    answers=st.lists(st.lists(st.ip_addresses(), min_size=1, max_size=3), min_size=1, max_size=4),
    hops=st.integers(min_value=0, max_value=3),
    dead=st.booleans(),
)
def test_what_is_dialled_was_checked(answers: list[list[Address]], hops: int, dead: bool) -> None:
    """Whatever a name server says, and however its answers change between a check and a connection."""
    names = Names(*answers)
    network = Network(
        *[redirect(f"http://host{at}.example/") for at in range(hops)], PICTURE, dead=answers[0][:1] if dead else ()
    )
    got = fetch("http://host.example/cat.png", names, network)
    policy = AddressPolicy()
    for host, _ in network.dialled:
        assert policy.allows(ip_address(host))
    refused = [answer for answer in names.given if not all(policy.allows(one) for one in answer)]
    assert {host for host, _ in network.dialled} <= {
        str(one) for answer in names.given for one in answer if answer not in refused
    }
    assert len(names.asked) == len(set(names.asked)), "one look-up for each hop"
    assert bool(refused) <= isinstance(got, MediaUrlRefused)
    if got == b"png":
        assert len(names.asked) == hops + 1


def test_a_name_that_is_bound_anew_is_not_looked_up_again() -> None:
    names, network = Names([PUBLIC], [PRIVATE]), Network(PICTURE)
    assert fetch("http://rebind.example/cat.png", names, network) == b"png"
    assert (names.asked, network.dialled) == (["rebind.example"], [("1.1.1.1", 80)])


@pytest.mark.parametrize("answer", [[PRIVATE], [PUBLIC, PRIVATE], [PRIVATE, PUBLIC], [PUBLIC, ip_address("::1")]])
def test_one_closed_address_closes_the_name(answer: list[Address]) -> None:
    network = Network(PICTURE)
    got = fetch("http://mixed.example/cat.png", Names(answer), network)
    assert isinstance(got, MediaUrlRefused) and (got.param, network.dialled) == ("messages[0]", [])
    assert not any(str(one) in got.message for one in answer)


def test_a_redirect_to_a_name_with_a_private_address() -> None:
    network = Network(redirect("http://inner.example/"), PICTURE)
    got = fetch("http://outer.example/", Names([PUBLIC], [PRIVATE]), network)
    assert isinstance(got, MediaUrlRefused) and network.dialled == [("1.1.1.1", 80)]


def test_an_address_is_dialled_without_a_look_up() -> None:
    names, network = Names([PRIVATE]), Network(PICTURE)
    assert fetch("http://1.1.1.1:8080/cat.png", names, network, allowed_ports="any") == b"png"
    assert (names.asked, network.dialled) == ([], [("1.1.1.1", 8080)])


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://[::ffff:10.0.0.1]/", "http://0x7f000001/", "ftp://a/"])
def test_what_the_policy_refuses_opens_nothing(url: str) -> None:
    names, network = Names([PUBLIC]), Network(PICTURE)
    assert isinstance(fetch(url, names, network), MediaUrlRefused)
    assert (names.asked, network.dialled) == ([], [])


def test_the_next_address_is_tried_where_one_takes_no_connection() -> None:
    network = Network(PICTURE, dead=[PUBLIC])
    assert fetch("http://images.example/", Names([PUBLIC, OTHER]), network) == b"png"
    assert [host for host, _ in network.dialled] == ["1.1.1.1", "8.8.8.8"]


def test_a_name_without_an_address_and_a_host_that_is_down() -> None:
    got = fetch("http://nowhere.example/", Names([]), Network(PICTURE))
    assert isinstance(got, MediaUnreachable) and "no address" in got.message
    got = fetch("http://down.example/", Names([PUBLIC]), Network(PICTURE, dead=[PUBLIC]))
    assert isinstance(got, MediaUnreachable) and "no connection" in got.message


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    names, network = Names([PUBLIC]), Network(PICTURE)

    async def run() -> None:
        fetcher = MediaFetcher(MediaUrlSettings(), 1000, resolver=names, dialer=network)
        for _ in range(2):  # the mock's stream ends after the first answer
            async with fetcher.fetch("http://images.example/cat.png", "messages[0]") as fetched:
                assert fetched.data == b"png"
        await fetcher.close()

    asyncio.run(run())
    assert len(network.dialled) == len(names.asked) == 2


def test_a_new_connection_that_is_closed_is_not_tried_again() -> None:
    network = Network(b"")
    assert isinstance(fetch("http://images.example/", Names([PUBLIC]), network), MediaUnreachable)
    assert len(network.dialled) == 1


async def test_a_name_server_that_does_not_answer() -> None:
    async def never(host: str, port: int) -> list[Address]:
        await asyncio.Event().wait()
        return []

    network = Network(PICTURE)
    with pytest.raises(MediaUnreachable, match="media_urls.connect_timeout_s"):
        await CheckedDialer(AddressPolicy(), never, network).connect_tcp("slow.example", 80, timeout=0.02)
    assert network.dialled == []


async def test_the_c_librarys_look_up() -> None:
    resolver = Resolver()
    try:
        assert await resolver("127.0.0.1", 80) == [ip_address("127.0.0.1")]
        with pytest.raises(OSError):
            await resolver("name.invalid", 80)
    finally:
        resolver.close()
