"""The environments of the clients' suites are made as pip would make them."""

from __future__ import annotations

import pytest

from tests.e2e.client_venvs import translated

ANY = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", {}),
        (":env:.find-links='/wheels /more'\n", {"UV_FIND_LINKS": "/wheels,/more"}),
        ("global.extra-index-url='\\nfile:///a\\nfile:///b'\n", {"UV_INDEX": "file:///a file:///b"}),
        (
            ":env:.index-url='https://c/simple?a=b'\nglobal.index-url='https://a'\ninstall.index-url='https://b'\n",
            {"UV_DEFAULT_INDEX": "https://c/simple?a=b"},
        ),
        ("global.index-url='https://a'\ninstall.index-url='https://b'\n", {"UV_DEFAULT_INDEX": "https://b"}),
        (":env:.cert='/ca.crt'\n:env:.default-timeout='180'\ndownload.no-index='1'\n", {"SSL_CERT_FILE": "/ca.crt"}),
    ],
)
def test_pips_settings(listed: str, expected: dict[str, str]) -> None:
    assert translated(listed) == ANY | expected
