"""app.settings_media.MediaUrlSettings: what may be written, and what it comes to."""

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from app.settings import SettingsError, environment, load
from tests import readme


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("allowed_ports", "80,0", "'0' is no port"),
        ("allowed_ports", "65536", "'65536' is no port"),
        ("allowed_ports", " , ", "at least one"),
        ("schemes", "ftp", "'http' or 'https'"),
        ("schemes", "", "at least one"),
        ("allow_private", "10.0.0.1/8", "not a valid IPv4 or IPv6 network"),
        ("allowed_media_domains", "http://a.example", "'http://a.example' is no host"),
        ("denied_media_domains", "a.*.example", "'a.*.example' is no host"),
        ("proxy_url", "socks5://proxy:1080", "must be http:// or https://"),
        ("proxy_url", "http://proxy", "a host and a port"),
        ("identity", "uuid", "'content' or 'url'"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(name: str, given: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(media_urls={name: given})
    assert str(caught.value).startswith(f"media_urls.{name} (TRIVET_MEDIA_URLS__{name.upper()}): ")
    assert said in str(caught.value)


def test_a_proxys_password_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as caught:
        load(media_urls={"proxy_url": "socks5://user:secret@proxy:1080"})
    assert "secret" not in str(caught.value)


def test_children_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "allowed_media_domains": "b.example,*.a.example",
        "allowed_ports": "8080,443",
        "allow_private": "127.0.0.0/8, ::1",
        "schemes": "https",
        "allow_redirects": False,
        "proxy_url": "http://user:secret@proxy:3128",
    }
    chosen = load(media_urls=given)
    assert chosen.media_urls.allow_private == {ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")}
    for name, value in environment(chosen).items():
        monkeypatch.setenv(name, value)
    assert load() == chosen


def test_the_example_in_the_readme() -> None:
    (block,) = readme.blocks("toml", readme.section("Media from URLs"))
    Path("trivet.toml").write_text(block)
    chosen = load().media_urls
    assert "*.cdn.example.com" in chosen.allowed_media_domains and not chosen.allow_redirects


def test_a_file_may_have_lists_and_numbers() -> None:
    Path("trivet.toml").write_text("[media_urls]\nallowed_ports = [80, 8080]\nallow_private = ['10.0.0.0/8']\n")
    assert load().media_urls.allowed_ports == {"80", "8080"}
    Path("trivet.toml").write_text("[media_urls]\nallowed_ports = 'any'\n")
    assert load().media_urls.allowed_ports == {"any"}
