"""app.cli.lora: what it asks the API, and what it shows."""

import json
from functools import partial
from typing import Any

import httpx
import pytest

from app.cli import api_client
from tests import cli

FOUND = {"lora_name": "sql", "version": "v1", "rank": 8, "size": 1_500_000, "uri": "s3://a/sql"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(method, path, body) of what the API was asked."""
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.path, json.loads(request.content or b"null")))
        if "down" in request.url.host:
            raise httpx.ConnectError("nobody there")
        if "refuses" in request.url.host:
            return httpx.Response(403, json={"error": {"message": "this needs the server's admin key"}})
        data = [] if "empty" in request.url.host else [FOUND]
        return httpx.Response(200, json={"message": "sql is loaded on 2 workers", "id": "sql@v1", "data": data})

    cli.answer_by(monkeypatch, answer, admin=True)
    return seen


run = partial(cli.run, "lora")


def test_load_and_unload(asked: list[Any]) -> None:
    assert run("load", "sql", "s3://a/sql") == "sql is loaded on 2 workers: sql@v1\n"
    run("unload", "sql")
    assert asked == [
        ("POST", "/v1/loras", {"lora_name": "sql", "source": {"uri": "s3://a/sql"}}),
        ("POST", "/unload_lora", {"lora_name": "sql"}),
    ]


def test_list(asked: list[Any]) -> None:
    told = run("list").splitlines()
    assert told[1].split() == ["sql", "v1", "8", "1.5", "s3://a/sql"]
    assert run("list", "--url", "http://empty") == "no adapters\n"
    assert asked[0] == ("GET", "/v1/loras", None)


@pytest.mark.parametrize(("host", "reason"), [("refuses", "403: this needs"), ("down", "is `trivet up` running?")])
def test_what_goes_wrong_is_one_line(asked: list[Any], host: str, reason: str) -> None:
    told = run("list", "--url", f"http://{host}", code=1)
    assert reason in told and len(told.splitlines()) == 1


def test_the_admin_key_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_API__ADMIN_KEY", "sk-admin")
    monkeypatch.setenv("TRIVET_API__API_KEYS", "sk-user")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-elsewhere")
    assert api_client._key(None, "none-of-this-name", admin=True) == "sk-admin"
    assert api_client._key(None, "none-of-this-name") == "sk-user"
    assert api_client._key("http://elsewhere", "none-of-this-name", admin=True) == "sk-elsewhere"
