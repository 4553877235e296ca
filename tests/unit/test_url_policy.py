"""app.media.url_policy: what a URL is taken for, and what is refused before anything is resolved."""

from typing import Any
from urllib.parse import urlsplit

import httpcore
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.errors.media import MediaUrlRefused
from app.media.url_policy import MediaUrl, UrlPolicy, scheme
from app.settings import SettingsError
from app.settings_media import MediaUrlSettings

PUBLIC = "http://images.example.com/cat.png"


def policy(**limits: Any) -> UrlPolicy:
    return UrlPolicy(MediaUrlSettings(**limits))


def refusal(url: str, **limits: Any) -> str:
    with pytest.raises(MediaUrlRefused) as caught:
        policy(**limits).check(url)
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (PUBLIC, PUBLIC),
        ("HTTP://Images.Example.COM", "http://images.example.com/"),
        ("https://images.example.com:443/a", "https://images.example.com/a"),
        ("https://images.example.com:80/a", "https://images.example.com:80/a"),
        ("http://images.example.com./a?b=/c?d#e", "http://images.example.com/a?b=/c?d"),
        ("http://images.example.com?a=1", "http://images.example.com/?a=1"),
        ("http://images.example.com#@evil.example", "http://images.example.com/"),
        ("http://my_bucket.example.com/%2e%2e/ü b|c", "http://my_bucket.example.com/%2e%2e/%C3%BC%20b%7Cc"),
        ("http://images.example.com/a?x=ü&y=[1]", "http://images.example.com/a?x=%C3%BC&y=[1]"),
        ("http://bücher.example/a", "http://xn--bcher-kva.example/a"),
        ("http://Bücher。example/a", "http://xn--bcher-kva.example/a"),
        ("http://ｅxample.com/a", "http://example.com/a"),
        ("http://1.1.1.1/a", "http://1.1.1.1/a"),
        ("http://１.１.１.１/a", "http://1.1.1.1/a"),
        ("http://[2606:4700::1111]/a", "http://[2606:4700::1111]/a"),
        ("http://[2606:4700:0:0::1111]/a", "http://[2606:4700::1111]/a"),
        ("http://1.example.com/", "http://1.example.com/"),
        ("http://a.example.com/http://10.0.0.1/", "http://a.example.com/http://10.0.0.1/"),
    ],
)
def test_a_url_has_one_reading(text: str, read: str) -> None:
    assert str(policy().check(text)) == read


HOSTS = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "0x7f000001",
    "0x7f.1",
    "0X7F.0.0.1",
    "2130706433",
    "0177.0.0.1",
    "017700000001",
    "127.0.0.01",
    "127.0.0.0x1",
    "0",
    "0.0.0.0",
    "127.0.0.1.",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[2002:7f00:1::]",
    "[fe80::1%25eth0]",
    "[fe80::1%eth0]",
    "[fd00:ec2::254]",
    "169.254.169.254",
    "100.100.100.200",
    "10.0.0.1",
    "192.168.0.1",
    "１２７.０.０.１",
    "127。0。0。1",
    "①②⑦.0.0.1",
    "127.0.0.1%00.example.com",
    "%31%32%37.0.0.1",
    "example%2ecom",
    "example.com%0d%0a",
    "good.example@127.0.0.1",
    "user:password@example.com",
    "@example.com",
    "example.com@",
    r"good.example\@127.0.0.1",
    r"127.0.0.1\.example.com",
    "good.example\t",
    "127.0.\n0.1",
    "exa mple.com",
    "example..com",
    "example.com..",
    ".example.com",
    "",
    ":80",
    "example.com:",
    "example.com:0",
    "example.com:65536",
    "example.com:99999999999",
    "example.com:-1",
    "example.com:80:80",
    "example.com:８０",
    "example.com:8080",
    "[::1",
    "::1",
    "[example.com]",
    "[127.0.0.1]",
    "[::ffff:127.0.0.1]x",
    "a" * 64 + ".example",
    ".".join(["a" * 60] * 5),
    "exa\u00admple.com\u0000",
    "\ud800.example",
    "xn--" + "ü" + ".example",
    "exam<ple.com",
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_is_refused_unseen(host: str) -> None:
    said = refusal(f"http://{host}/secret.png?token=abc")
    assert not any(word in said for word in ("secret", "token", "127", "example.com"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cat.png",
        "//example.com/cat.png",
        "http:example.com",
        "http:/example.com",
        "http:///cat.png",
        " http://example.com/",
        "\thttp://example.com/",
        "ht\ntp://example.com/",
        "http://example.com/a\r\nHost: other",
        "http://example.com/a\x00",
        "http:\\\\example.com\\a",
        "http://example.com/a\\b",
        "ftp://example.com/a",
        "gopher://example.com:80/_",
        "blob:http://example.com/a",
        "javascript:alert(1)",
        "jar:http://example.com!/a",
        "http+unix://%2Frun%2Fa.sock/a",
        "http://example.com/" + "a" * 8192,
    ],
)
def test_what_is_no_url_to_fetch(url: str) -> None:
    assert len(refusal(url)) < 200


def test_the_message_names_the_setting() -> None:
    assert "media_urls.allow_private" in refusal("http://10.0.0.1/")
    assert "media_urls.allowed_ports (80, 443)" in refusal("http://example.com:8080/")
    assert "media_urls.schemes (https)" in refusal(PUBLIC, schemes="https")
    assert "media_urls.denied_media_domains" in refusal(PUBLIC, denied_media_domains="*.example.com")
    assert "media_urls.allowed_media_domains" in refusal(PUBLIC, allowed_media_domains="other.example")


def test_allowed_networks_and_ports() -> None:
    lenient = policy(allow_private="127.0.0.0/8,::1", allowed_ports="any")
    assert lenient.check("http://127.0.0.1:9000/a").authority == "127.0.0.1:9000"
    assert lenient.check("http://[::1]:9000/a").authority == "[::1]:9000"
    for other in ("http://10.0.0.1/", "http://127.1/", "http://0x7f000001/"):
        with pytest.raises(MediaUrlRefused):
            lenient.check(other)


@pytest.mark.parametrize(
    ("host", "fits"),
    [
        ("example.com", True),
        ("EXAMPLE.com.", True),
        ("cdn.example.com", False),
        ("a.cdn.example.org", True),
        ("cdn.example.org", True),
        ("example.org", False),
        ("evilexample.org", False),
        ("example.com.evil.example", False),
        ("bücher.example", True),
        ("xn--bcher-kva.example", True),
        ("1.1.1.1", True),
        ("1.1.1.2", False),
    ],
)
def test_lists_of_hosts(host: str, fits: bool) -> None:
    listed = "Example.com, *.example.org, Bücher.example, 1.1.1.1"
    for limits, passes in (({"allowed_media_domains": listed}, fits), ({"denied_media_domains": listed}, not fits)):
        if passes:
            assert policy(**limits).check(f"http://{host}/")
        else:
            assert "media_domains" in refusal(f"http://{host}/", **limits)


def test_a_denied_host_is_not_allowed_by_the_other_list() -> None:
    assert "denied" in refusal(PUBLIC, allowed_media_domains="*.example.com", denied_media_domains="images.example.com")


def test_an_allowed_host_still_needs_an_allowed_address() -> None:
    assert "allow_private" in refusal("http://10.0.0.1/", allowed_media_domains="10.0.0.1")


def test_a_list_with_a_host_that_is_none() -> None:
    with pytest.raises(SettingsError, match="media_urls.allowed_media_domains: '127.1' is no host"):
        policy(allowed_media_domains="127.1")


@pytest.mark.parametrize(
    ("location", "leads_to"),
    [
        ("/b.png", "https://images.example.com/b.png"),
        ("b.png?x=1", "https://images.example.com/a/b.png?x=1"),
        ("../b.png", "https://images.example.com/b.png"),
        ("?x=1", "https://images.example.com/a/cat.png?x=1"),
        ("//cdn.example.com/b", "https://cdn.example.com/b"),
        ("https://cdn.example.com", "https://cdn.example.com/"),
    ],
)
def test_a_redirect(location: str, leads_to: str) -> None:
    chosen = policy()
    assert str(chosen.follow(chosen.check("https://images.example.com/a/cat.png"), location)) == leads_to


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("http://images.example.com/", "from https to http"),
        ("https://10.0.0.1/", "media_urls.allow_private"),
        ("//169.254.169.254/latest", "media_urls.allow_private"),
        ("https://localhost:6379/", "media_urls.allowed_ports"),
        ("https://user@cdn.example.com/", "user or a password"),
        ("file:///etc/passwd", "scheme must be"),
        ("data:image/png;base64,AAAA", "scheme must be"),
        (r"https://cdn.example.com\@10.0.0.1/", "backslash"),
        ("https://cdn.exam\tple.com/", "control character"),
        ("https://[::1/", "no URL"),
    ],
)
def test_a_redirect_passes_the_whole_policy_again(location: str, why: str) -> None:
    chosen = policy()
    with pytest.raises(MediaUrlRefused, match="redirect") as caught:
        chosen.follow(chosen.check("https://images.example.com/a/cat.png"), location)
    assert why in caught.value.message and "10.0.0.1" not in caught.value.message


def test_redirects_can_be_off() -> None:
    chosen = policy(allow_redirects=False)
    with pytest.raises(MediaUrlRefused, match="media_urls.allow_redirects is off"):
        chosen.follow(chosen.check(PUBLIC), "/b.png")


def test_through_a_proxy_local_names_are_refused_and_addresses_still_checked() -> None:
    proxied: dict[str, Any] = {"proxy_url": "http://proxy.example:3128"}
    for host in ("localhost", "redis", "a.localhost", "metadata.google.internal", "printer.local"):
        assert "local name" in refusal(f"http://{host}/", **proxied)
        assert policy(allowed_media_domains=host, **proxied).check(f"http://{host}/")
    assert "allow_private" in refusal("http://169.254.169.254/", **proxied)
    assert "IPv6" in refusal("http://[2606:4700::1111]/", **proxied)
    assert policy(**proxied).check(PUBLIC)


@pytest.mark.parametrize(
    ("text", "known"), [("FILE:///a", "file"), ("data:,", "data"), ("a b:c", ""), ("", ""), ("1a:b", "")]
)
def test_the_scheme(text: str, known: str) -> None:
    assert scheme(text) == known


PIECES = st.sampled_from(
    [
        *"@:/\\?#[]%.",
        "http://",
        "https:",
        "//",
        "127.0.0.1",
        "10.1",
        "::1",
        "example.com",
        "%2e",
        "\t",
        "\r\n",
        "：",
        "。",
    ]
)
URLS = st.lists(PIECES | st.text(max_size=3), max_size=8).map(lambda parts: "http://" + "".join(parts))


def accepted(text: str) -> MediaUrl | None:
    try:
        return policy(allowed_ports="any").check(text)
    except MediaUrlRefused:
        return None


@given(URLS)
@example("http://A?")
@example("http://example.com/a?b#c")
@example("http://[2606:4700::1111]:81/")
def test_no_other_reader_sees_another_host(text: str) -> None:
    """Whatever comes through is plain to the parsers of the standard library and of httpcore, and to our own again."""
    url = accepted(text)
    if url is None:
        return
    again, library, other = accepted(str(url)), urlsplit(str(url)), httpcore.URL(str(url))
    assert again == url
    assert (library.hostname, library.port or 80, library.username) == (url.host, url.port, None)
    assert (other.host.decode(), other.port or 80, other.target.decode()) == (url.host, url.port, url.target)
    assert str(url).isascii() and str(url).isprintable() and " " not in str(url)
