"""api.errors: whatever goes wrong, an OpenAI error object, small and without an echo."""

from typing import Annotated, Any, Literal

import httpx
import orjson
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from openai.types import ErrorObject
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.exceptions import HTTPException

from api import errors
from app.errors.base import Failure
from app.errors.requests import InvalidRequest, TooManyRequests
from app.errors.serving import DeadlineExceeded, NoWorker

LARGEST = 4096
HOSTILE = "Zx9-hostile-" * 10_000


def shown(failure: Failure) -> ErrorObject:
    """The body as OpenAI's client types it."""
    raw = errors.body(failure)
    assert len(raw) < LARGEST
    return ErrorObject.model_validate(orjson.loads(raw)["error"], strict=True)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (InvalidRequest("wrong", param="messages[0]").failure(), "invalid_request_error"),
        (Failure(404, "model_not_found", "no"), "invalid_request_error"),
        (TooManyRequests("later").failure(), "rate_limit_error"),
        (NoWorker("none").failure(), "server_error"),
        (Failure(500, "internal_error", "oh"), "server_error"),
    ],
)
def test_the_body_is_openais(failure: Failure, kind: str) -> None:
    error = shown(failure)
    assert (error.type, error.code, error.message, error.param) == (kind, failure.code, failure.message, failure.param)


def test_headers_say_whether_to_try_again() -> None:
    assert errors.response(NoWorker("none").failure()).headers["Retry-After"] == "5"
    assert "x-should-retry" not in errors.response(NoWorker("none").failure()).headers
    late = errors.response(DeadlineExceeded("late").failure())
    assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")


def test_the_last_frame_ends_the_stream() -> None:
    data, done, end = errors.frame(NoWorker('with "quotes"\n and a line').failure()).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert "\n" not in data
    assert orjson.loads(data.removeprefix("data: "))["error"]["code"] == "no_worker"


@given(st.text(st.characters()), st.none() | st.text(st.characters()), st.integers(1, 2000))
def test_no_text_makes_it_large_or_breaks_it(message: str, param: str | None, times: int) -> None:
    shown(Failure(400, "invalid_request", message * times, None if param is None else param * times))


class Text(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Picture(BaseModel):
    type: Literal["image_url"]
    image_url: dict[str, str]


class Asked(BaseModel):
    role: Literal["user", "system"]
    content: str | list[Text | Picture]

    @field_validator("role", mode="before")
    @classmethod
    def _rude(cls, value: Any) -> Any:
        if value == "rude":
            raise ValueError("so long " * 1000)
        return value


class Body(BaseModel):
    messages: Annotated[list[Asked], Field(min_length=1)]
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[dict[str, dict[str, int]]] = []


def failure_of(body: Any) -> Failure:
    with pytest.raises(ValidationError) as caught:
        Body.model_validate(body)
    return errors.invalid(caught.value)


GOOD = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [GOOD, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [GOOD, {"role": HOSTILE, "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": HOSTILE}]}]}, "messages[0].content"),
        ({"messages": [GOOD], "max_tokens": HOSTILE}, "max_tokens"),
        ({"messages": [GOOD], "logit_bias": {HOSTILE: "x"}}, "logit_bias"),
        ({"messages": [GOOD], "logit_bias": {"a" * 100_000: "x"}}, "logit_bias"),
        ({"messages": [GOOD], "tools": [{"a" * 64: {"b" * 64: HOSTILE}}]}, f"tools[0].{'a' * 64}.{'b' * 64}"),
        ({"messages": [HOSTILE] * 1000}, "messages[0]"),
        ({"messages": [{"role": "rude", "content": "x"}] * 50}, "messages[0].role"),
        ([HOSTILE], "body"),
        (HOSTILE, "body"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_failed_validation_names_the_field_and_repeats_nothing(body: Any, param: str) -> None:
    failure = failure_of(body)
    error = shown(failure)
    assert (failure.status, error.param) == (400, param)
    assert "hostile" not in error.message and "aaaaa" * 20 not in error.message
    assert error.message.startswith(f"{param}: ")


def test_many_errors_are_counted_and_not_listed() -> None:
    assert failure_of({"messages": [{}] * 100}).message.endswith("(and 195 more)")


def test_union_members_are_no_fields() -> None:
    assert errors._path(("messages", 0, "UserMessage", "content", "list[Text]", 3, "Text", "text")) == (
        "messages[0].content[3].text"
    )
    assert errors._path(("body", "function-after[x(), str]", "n")) == "n"


def application() -> FastAPI:
    app = FastAPI()
    errors.install(app)

    @app.get("/trivet")
    async def trivet() -> None:
        raise NoWorker("no worker for: decode")

    @app.get("/unexpected")
    async def unexpected() -> None:
        raise RuntimeError(HOSTILE)

    @app.get("/http")
    async def http() -> None:
        raise HTTPException(418, "short and stout")

    @app.post("/typed")
    async def typed(body: Body) -> None: ...

    return app


async def ask(method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(application(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        response = await client.request(method, path, **options)
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < LARGEST
    ErrorObject.model_validate(response.json()["error"], strict=True)
    return response


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/trivet", 503, "no_worker"),
        ("GET", "/unexpected", 500, "internal_error"),
        ("GET", "/http", 418, "http_error"),
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/typed", 405, "method_not_allowed"),
    ],
)
async def test_every_exception_of_a_route(method: str, path: str, status: int, code: str) -> None:
    response = await ask(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "hostile" not in response.text
    if status == 405:
        assert response.headers["Allow"] == "POST"


async def test_a_typed_routes_body() -> None:
    response = await ask("POST", "/typed", json={"messages": [{"role": HOSTILE, "content": 1}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].role")
    assert "hostile" not in response.text
    response = await ask("POST", "/typed", content=b"{not json" + HOSTILE.encode())
    assert response.status_code == 400 and "hostile" not in response.text
