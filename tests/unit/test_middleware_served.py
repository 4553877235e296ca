"""The API's middleware under a real uvicorn, asked by real clients."""

import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest

from api.http_protocol import MAX_HEAD_BYTES
from tests.polling import until
from tests.served_app import served

KEY, SECOND = "sk-first-5ecret", "sk-second-5ecret"
BEARER = {"Authorization": f"Bearer {KEY}"}
ORIGIN = "https://chat.example.com"
HTTP = ("--http", "api.http_protocol:BoundedHttp")
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "log"


@pytest.fixture(scope="module")
def url(log: Path) -> Iterator[str]:
    variables = {
        "TRIVET_API__API_KEYS": f"{KEY},{SECOND}",
        "TRIVET_API__CORS_ORIGINS": ORIGIN,
        "TRIVET_API__SSE_KEEP_ALIVE_S": "0.1",
        "TRIVET_API__MAX_BODY_MB": "2",
    }
    with served(log, *HTTP, **variables) as made:
        yield made


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as made:
        yield made


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"json": {"model": model, **more}, "headers": BEARER}


CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "an answer": (200, "GET", "/v1/who", {"headers": BEARER}),
    "a stream": (200, "POST", "/v1/chat/completions", chat("m")),
    "no key": (401, "GET", "/v1/who", {}),
    "a wrong key, and a body": (401, "POST", "/v1/chat/completions", {"content": bytes(1_000_000)}),
    "no key for Anthropic's": (401, "POST", "/v1/messages", {"json": {}}),
    "no such endpoint": (404, "GET", "/nowhere", {"headers": BEARER}),
    "another method": (405, "DELETE", "/v1/who", {"headers": BEARER}),
    "too large": (413, "POST", "/v1/chat/completions", {"content": bytes(2_000_001), "headers": BEARER}),
    "not JSON": (400, "POST", "/v1/chat/completions", {"content": b"{", "headers": BEARER}),
    "unforeseen": (500, "POST", "/v1/chat/completions", chat("broken")),
    "unserved": (503, "POST", "/v1/chat/completions", chat("unserved")),
    "unserved for Anthropic's": (503, "POST", "/v1/messages", chat("m")),
    "health": (200, "GET", "/health/live", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_answer_has_its_id_and_a_web_page_may_read_it(client: httpx.Client, case: str) -> None:
    status, method, path, options = CASES[case]
    headers = options.get("headers", {}) | {"X-Request-Id": "mine-1", "Origin": ORIGIN}
    answer = client.request(method, path, **(options | {"headers": headers}))
    assert answer.status_code == status, answer.text
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert answer.headers.get_list("request-id") == (["mine-1"] if path == "/v1/messages" else [])
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert {"X-Request-Id", "Retry-After"} <= set(answer.headers["Access-Control-Expose-Headers"].split(", "))
    assert "Origin" in answer.headers["Vary"]
    if status >= 400:
        assert answer.headers["content-type"] == "application/json" and len(answer.content) < 4096
        assert ("type" in answer.json()) == (path == "/v1/messages")
        assert answer.json()["error"]["message"]
    assert (answer.headers.get("Retry-After") is not None) == (status == 503)


def test_a_preflight_passes_without_a_key(client: httpx.Client) -> None:
    wanted = "authorization,content-type,x-request-id,x-request-timeout,x-stainless-os,x-api-key,anthropic-version"
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": wanted,
    }
    answer = client.options("/v1/chat/completions", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert answer.headers["Access-Control-Allow-Headers"] == wanted
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert "Access-Control-Allow-Credentials" not in answer.headers
    assert len(answer.headers["X-Request-Id"]) == 32
    refused = client.options("/v1/chat/completions", headers=headers | {"Origin": "https://evil.example"})
    assert refused.status_code == 400 and "Access-Control-Allow-Origin" not in refused.headers


def test_other_origins_pages_may_not_read(client: httpx.Client) -> None:
    answer = client.get("/v1/who", headers=BEARER | {"Origin": "https://evil.example"})
    assert answer.status_code == 200 and "Access-Control-Allow-Origin" not in answer.headers


def test_openais_client_knows_a_refusal(url: str) -> None:
    with openai_client(url, "sk-wrong", max_retries=3) as client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"X-Request-Id": "abc"})
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
    assert caught.value.request_id == "abc"
    assert caught.value.response.headers["www-authenticate"] == "Bearer"


def test_openais_client_reads_a_stream_with_comments_in_it(url: str) -> None:
    with openai_client(url, SECOND) as client:
        stream = client.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, extra_body={"silence": 0.5}, timeout=20
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ab"


def openai_client(url: str, key: str, max_retries: int = 0) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=max_retries, http_client=http)


@pytest.mark.parametrize("credentials", [{"api_key": "wrong"}, {"auth_token": "wrong", "api_key": None}], ids=str)
def test_anthropics_client_knows_a_refusal(url: str, credentials: dict[str, Any]) -> None:
    with anthropic_client(url, **credentials) as client, pytest.raises(anthropic.AuthenticationError) as caught:
        client.messages.create(model="m", messages=MESSAGES, max_tokens=1)
    assert caught.value.body == {"type": "error", "error": {"type": "authentication_error", "message": WRONG}}
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]


WRONG = "the API key is not one that this API knows"


@pytest.mark.parametrize("credentials", [{"api_key": KEY}, {"auth_token": KEY, "api_key": None}], ids=str)
def test_anthropics_client_gets_in_by_its_own_header_and_by_openais(url: str, credentials: dict[str, Any]) -> None:
    with anthropic_client(url, **credentials) as client, pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(model="served by none", messages=MESSAGES, max_tokens=1)
    error: Any = caught.value.body
    assert (caught.value.status_code, error["error"]["type"]) == (503, "overloaded_error")
    assert "served by none" in error["error"]["message"]


def anthropic_client(url: str, **credentials: Any) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=url, max_retries=0, http_client=http, **credentials)


def test_comments_come_between_events_and_not_after_the_last(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", **chat("m", silence=0.55))
    first, *pings, last, done, end = answer.text.split("\n\n")
    assert 3 <= len(pings) <= 5 and set(pings) == {": ping"}
    assert [json.loads(one.removeprefix("data: "))["choices"][0]["delta"]["content"] for one in (first, last)] == [
        "a",
        "b",
    ]
    assert (done, end) == ("data: [DONE]", "")


async def test_a_client_that_leaves_a_silent_stream_ends_it(url: str, log: Path) -> None:
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", **chat("m", silence=60, note="left early")) as answer,
    ):
        lines: AsyncIterator[str] = answer.aiter_lines()
        while await anext(lines) != ": ping":
            pass
    await until(lambda: "the stream of 'left early' has ended" in log.read_text(), "the generator is closed")


def raw(url: str, *pieces: bytes) -> bytes:
    """What the server answers to these bytes, until it closes the connection."""
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), address.port or 0), timeout=20) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            return b"closed while sending"
        found = b""
        try:
            while more := connection.recv(65536):
                found += more
        except ConnectionResetError:
            return found or b"closed while sending"
        return found


START = f"GET /v1/who HTTP/1.1\r\nHost: api\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n".encode()
CHUNKED = START.replace(b"GET /v1/who", b"POST /v1/chat/completions") + b"Transfer-Encoding: chunked\r\n\r\n"


def test_large_headers_are_taken_up_to_the_limit(url: str) -> None:
    answer = raw(url, START, b"x-large: " + b"a" * (MAX_HEAD_BYTES // 2), b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "pieces",
    [
        (START, *[b"x-%d: %s\r\n" % (at, b"a" * 1000) for at in range(3000)]),
        (START + b"x-large: ", *[b"a" * 10_000] * 300),
        (b"GET /", *[b"a" * 10_000] * 300),
        (CHUNKED, b"1\r\na\r\n0\r\n", *[b"x-%d: %s\r\n" % (at, b"a" * 1000) for at in range(3000)]),
        (CHUNKED, b"1;", *[b"a" * 10_000] * 300),
    ],
    ids=["many", "one", "path", "trailers", "chunk extension"],
)
def test_what_never_ends_is_cut_off(url: str, pieces: tuple[bytes, ...]) -> None:
    answer = raw(url, *pieces)
    # What was sent meanwhile makes the kernel reset the connection, and the answer may be lost with it.
    assert answer == b"closed while sending" or answer.startswith(b"HTTP/1.1 431 ")
    if answer.startswith(b"HTTP"):
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/health/live").status_code == 200


def test_a_large_body_in_many_pieces_is_no_large_head(client: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"model": "unserved", "text": "'
        for _ in range(200):
            yield b"a" * 9_000
        yield b'"}'

    answer = client.post(
        "/v1/chat/completions", content=pieces(), headers=BEARER | {"Content-Type": "application/json"}
    )
    assert answer.status_code == 503, answer.text


def test_the_log_has_no_keys(client: httpx.Client, log: Path) -> None:
    client.post("/v1/chat/completions", **chat("broken"))
    client.get("/v1/who", headers={"x-api-key": "sk-wrong-5ecret"})
    said = log.read_text()
    assert "RuntimeError: a bug" in said and said.count("Traceback") == said.count("unexpected error in request")
    assert "5ecret" not in said


def test_several_processes_have_the_same_keys(tmp_path: Path) -> None:
    pids: set[int] = set()
    with served(tmp_path / "log", *HTTP, "--workers", "2", TRIVET_API__API_KEYS=KEY) as url:
        for _ in range(200):
            with httpx.Client(base_url=url, trust_env=False) as client:  # a connection stays with one process
                assert client.get("/v1/who", headers={"x-api-key": SECOND}).status_code == 401
                pids.add(client.get("/v1/who", headers=BEARER).json()["pid"])
            if len(pids) == 2:
                break
    assert len(pids) == 2


def test_without_origins_no_web_page_may_read_anything(tmp_path: Path) -> None:
    with served(tmp_path / "log") as url, httpx.Client(base_url=url, trust_env=False) as client:
        answer = client.get("/v1/who", headers={"Origin": ORIGIN})
        assert answer.status_code == 200
        preflight = client.options("/v1/who", headers={"Origin": ORIGIN, "Access-Control-Request-Method": "GET"})
        assert preflight.status_code == 405
        for one in (answer, preflight):
            assert not [name for name in one.headers if name.startswith("access-control")]
            assert one.headers["X-Request-Id"]
