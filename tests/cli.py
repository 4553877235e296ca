"""Commands of `trivet`, run in this process, with a function in the API's place."""

from collections.abc import Callable

import httpx
import pytest
from typer.testing import CliRunner

from app.cli import api_client
from app.cli.main import app


def run(*words: str, code: int = 0) -> str:
    """What the command says. It has to end with `code`."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output


def answer_by(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response], *, admin: bool = False
) -> None:
    """`admin`: the command has to ask with the admin key, or else without."""

    def connect(url: str | None, _name: str, _read_timeout_s: float, **key: bool) -> httpx.Client:
        assert key == ({"admin": True} if admin else {})
        return httpx.Client(base_url=url or "http://api", transport=httpx.MockTransport(answer))

    monkeypatch.setattr(api_client, "connect", connect)
