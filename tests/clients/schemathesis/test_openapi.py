"""Requests made from /openapi.json: no fault of the server's, no hang, and errors in the shape that clients read."""

from __future__ import annotations

import os
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, settings

SERVER_URL = os.environ["SERVER_URL"]
#: For each operation, beside those that the schema's limits give rise to.
EXAMPLES = 20
#: Longest wait for an answer, in seconds.
LIMIT_S = 30
#: How much may be generated: what is asked for beyond that is no fault to be found but work.
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2}
#: The fields that limit an answer's length, where leaving them out means as much as the context holds.
LENGTH = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
PROMPTS: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "input": "Hello!"}
MAX_ERROR_BYTES = 4096

#: Fields that the schema says too little of: most of what it allows is refused.
FREE = {"tools", "tool_choice", "response_format", "logit_bias", "stream_options", "text", "reasoning", "thinking"}
FREE |= {"background", "previous_response_id"}
MODEL = "tiny"

schema = schemathesis.openapi.from_url(f"{SERVER_URL}/openapi.json")


def prepared(case: schemathesis.Case) -> schemathesis.Case:
    """With a bound on what the engines have to do. What is right by the schema gets a prompt that is right in every
    other respect, too, so that its other fields are read."""
    if not isinstance(case.body, dict):
        return case
    if case.meta is not None and case.meta.generation.mode.is_positive:
        case.body = {name: value for name, value in case.body.items() if name not in FREE}
        case.body |= {name: prompt for name, prompt in PROMPTS.items() if name in case.body}
        if "model" in case.body:
            case.body["model"] = MODEL
    if (field := LENGTH.get(case.path)) and case.body.get(field) is None:
        case.body[field] = MOST[field]
    for name, most in MOST.items():
        given = case.body.get(name)
        if isinstance(given, int | float) and given > most:
            case.body[name] = most
    return case


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
def test_operation(case: schemathesis.Case) -> None:
    response = prepared(case).call(timeout=LIMIT_S)
    assert response.status_code < 500, case.as_curl_command()
    if response.status_code >= 400:
        check_error(case, response)


def check_error(case: schemathesis.Case, response: Any) -> None:
    assert len(response.content) <= MAX_ERROR_BYTES
    assert response.headers["content-type"] == ["application/json"]
    body = response.json()
    if case.path.startswith("/v1/messages"):
        assert body.keys() == {"type", "error"} and body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert isinstance(body["error"]["code"], str)
    assert body["error"]["message"] and body["error"]["type"]


def test_the_server_serves_after_it_all() -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    answer = requests.post(f"{SERVER_URL}/v1/chat/completions", json=ask, timeout=LIMIT_S)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
