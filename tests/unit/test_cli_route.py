"""app.cli.route: what it asks the API, and what it shows."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli import route
from app.routing import Explanation
from tests import cli

FOUND = Explanation(
    policy="kv",
    blocks=62,
    tokens=1000,
    exact=False,
    candidates=[
        {"stage": "prefill", "worker": "prefill@gpu0", "incarnation": "a", "rank": 0, "cost": 251.0, "requests": 2},
        {
            "stage": "prefill", "worker": "prefill@gpu1", "incarnation": "b", "rank": 1, "held": 40, "predicted": 62,
            "embedding_bytes": 3 << 20, "prefill_tokens": 777, "kv_blocks": 99, "cost": 12.25, "overloaded": True,
            "chosen": True,
        },
    ],
    encode={"a" * 32: "encode@gpu2"},
)  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(path, body) of what the API was asked."""
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        seen.append((request.url.path, json.loads(request.content)))
        if "elsewhere" in request.url.host:
            return httpx.Response(404, json={"error": {"message": "no such endpoint"}})
        return httpx.Response(200, text=FOUND.model_dump_json())

    cli.answer_by(monkeypatch, answer)
    return seen


run = partial(cli.run, "route")


def test_the_choice_alone(asked: list[Any]) -> None:
    told = run("where to?").splitlines()
    assert asked == [("/debug/route", {"model": "tiny", "messages": [{"role": "user", "content": "where to?"}]})]
    assert told == [
        "prompt: 1000 tokens, 62 full blocks, as far as it is known",
        "policy: kv",
        "goes to prefill@gpu1 rank 1; the decode worker is chosen when the prompt is prefilled",
        f"item {'a' * 32} is encoded by encode@gpu2",
    ]


def test_all_candidates(asked: list[Any]) -> None:
    rows = [line.split() for line in run("where to?", "--explain").splitlines()[2:5]]
    assert rows[1] == ["prefill@gpu0", "prefill", "0", "2", "0", "0", "0.0", "MiB", "251.0"]
    assert rows[2] == [
        *("->", "prefill@gpu1", "rank", "1", "prefill", "62", "0", "777", "99", "3.0", "MiB", "12.2", "overloaded"),
    ]


def test_as_json(asked: list[Any]) -> None:
    assert Explanation.model_validate_json(run("where to?", "--json")) == FOUND


def test_a_fallback_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    route.show(FOUND.model_copy(update={"fallback": "slow", "policy": "least_loaded"}), every=False)
    assert "policy: least_loaded, since routing is slow" in capsys.readouterr().out


def test_a_whole_request_and_a_picture(asked: list[Any], tmp_path: Path) -> None:
    body = {"model": "other", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    (tmp_path / "body.json").write_text(json.dumps(body))
    run("--file", str(tmp_path / "body.json"))
    (tmp_path / "a.png").write_bytes(b"png")
    run("what is this?", "--image", str(tmp_path / "a.png"), "--model", "m")
    assert asked[0][1] == body
    assert asked[1][1]["model"] == "m"
    assert asked[1][1]["messages"][0]["content"][0]["image_url"]["url"] == "data:image/png;base64,cG5n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "either a question or --file"),
        (("x", "--file", "y"), "either a question or --file"),
        (("--file", "nowhere.json"), "nowhere.json holds no chat request"),
        (("x", "--url", "http://elsewhere"), "404: no such endpoint"),
    ],
)
def test_what_cannot_be_asked(asked: list[Any], words: tuple[str, ...], said: str) -> None:
    assert said in run(*words, code=1)


def test_a_file_that_holds_something_else(asked: list[Any], tmp_path: Path) -> None:
    for text in ("[]", "{"):
        (tmp_path / "body.json").write_text(text)
        assert "holds no chat request" in run("--file", str(tmp_path / "body.json"), code=1)
