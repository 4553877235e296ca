"""app.cli.chat: the talk, its stream and its errors, against a transport instead of a server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli import chat
from app.cli.api_client import ApiError
from app.cli.chat import Conversation

Respond = Callable[[dict[str, Any]], httpx.Response]


def stream(*frames: Any, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(frame)}\n\n" for frame in frames] + (["data: [DONE]\n\n"] if done else [])
    return httpx.Response(200, text=": comment\n\n" + "".join(lines))


def token(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


@pytest.fixture
def sent() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def talk(sent: list[dict[str, Any]]) -> Iterator[Callable[[Respond], Conversation]]:
    clients: list[httpx.Client] = []

    def make(respond: Respond) -> Conversation:
        def handle(request: httpx.Request) -> httpx.Response:
            sent.append(json.loads(request.content))
            return respond(sent[-1])

        clients.append(httpx.Client(base_url="http://api", transport=httpx.MockTransport(handle)))
        return Conversation(clients[-1], "tiny", {"max_tokens": 5})

    yield make
    for one in clients:
        one.close()


Talk = Callable[[Respond], Conversation]


def test_an_answer_comes_in_pieces_and_becomes_part_of_the_talk(talk: Talk, sent: list[dict[str, Any]]) -> None:
    one = talk(
        lambda _: stream({"choices": [{"delta": {"role": "assistant"}}]}, token("Hel"), token("lo"), {"choices": []})
    )
    assert list(one.ask("hi", [])) == ["Hel", "lo"]
    assert sent == [{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5}]
    list(one.ask("again", []))
    assert [message["content"] for message in sent[1]["messages"]] == ["hi", "Hello", "again"]


def test_pictures_go_as_data_urls_before_the_question(talk: Talk, sent: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    (tmp_path / "b").write_bytes(b"?")
    list(talk(lambda _: stream(token("x"))).ask("what?", [tmp_path / "a.jpg", tmp_path / "b"]))
    first, second, text = sent[0]["messages"][0]["content"]
    assert first == {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,anBlZw=="}}
    assert second["image_url"]["url"] == "data:image/png;base64,Pw=="
    assert text == {"type": "text", "text": "what?"}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "no media here"}}), "400: no media here"),
        (httpx.Response(502, text="<html>bad gateway"), "502: <html>bad gateway"),
        (httpx.Response(503, json={"detail": 1}), '503: {"detail":1}'),
        (stream(token("a"), {"error": {"message": "worker lost"}}), "worker lost"),
        (stream(token("a"), done=False), "the stream broke off before its end"),
    ],
)
def test_errors_are_told_and_leave_the_talk_as_it_was(talk: Talk, response: httpx.Response, message: str) -> None:
    one = talk(lambda _: response)
    with pytest.raises(ApiError) as caught:
        list(one.ask("hi", []))
    assert str(caught.value) == message
    assert one.messages == []


def test_a_server_that_is_not_there(talk: Talk) -> None:
    def refuse(_: Any) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(ApiError, match="http://api.*connection refused"):
        list(talk(refuse).ask("hi", []))


def test_the_repl_keeps_the_talk_until_it_is_reset(
    talk: Talk,
    sent: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    typed = iter(
        [
            "one",
            f"/image {tmp_path / 'a.png'}",
            "two",
            "",
            "/reset",
            "three",
            "/image /no/such",
            "four",
            "five",
            "/help",
            "/quit",
        ]
    )
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    chat._repl(talk(lambda _: stream(token("ok"))), [])
    assert [len(request["messages"]) for request in sent] == [1, 3, 1, 3]
    assert [type(request["messages"][-1]["content"]) for request in sent] == [str, list, str, str]
    assert sent[3]["messages"][-1]["content"] == "five"
    told = capsys.readouterr()
    assert told.out.count("ok\n") == 4
    assert told.out.count(chat.HELP) == 2
    assert told.err == "trivet: /no/such: No such file or directory\n"
