"""Streams, tool calls, reasoning and structured outputs through an adapter, as through the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import adapters
from tests.e2e.adapters import Expected, ask, call, load
from tests.e2e.prompts import PROMPTS
from tests.e2e.second_api import second_api
from tests.e2e.stack import MODEL, Stack
from tests.e2e.varied_requests import JSON_SCHEMA, NAMED, TIGHT, TOOLS

GREEDY: dict[str, Any] = {"temperature": 0, "logprobs": True, "top_logprobs": 1}
#: How vLLM's parser `granite` finds reasoning: by words, which a grammar can make any model say.
THOUGHTS = {"regex": "Here is my thought process: [a-z]{6} Here is my response: [a-z]{4}"}
GRANITE = {"TRIVET_API__REASONING_PARSER": "granite"}


@pytest.fixture(params=["agg", "e_p_d"])
def stack(request: pytest.FixtureRequest, stacks: Mapping[str, Stack], merged: Expected) -> Iterator[Stack]:
    """With the adapter `sql`."""
    stack = stacks[request.param]
    load(stack, "sql")
    yield stack
    adapters.clear(stack)


def chat(base_url: str, model: str, **more: Any) -> dict[str, Any]:
    """The choice."""
    body = {"model": model, "messages": PROMPTS["text"], "max_tokens": 120, **GREEDY, **more}
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    (choice,) = answer.json()["choices"]
    return dict(choice)


def scores(choice: dict[str, Any]) -> list[float]:
    """Whatever a form leaves to choose, how likely it was tells whose answer it is."""
    return [one["logprob"] for one in choice["logprobs"]["content"]]


def test_a_stream_says_what_the_whole_answer_says(stack: Stack, merged: Expected) -> None:
    asked: dict[str, Any] = {"model": "sql", "messages": PROMPTS["text"], "max_tokens": 24, "temperature": 0}
    chunks = stack.client.chat.completions.create(stream=True, extra_body={"ignore_eos": True}, **asked)
    found = [(one.model, one.choices[0].delta.content or "") for one in chunks if one.choices]
    whole = ask(stack, "sql", "text")
    assert whole.same_as(merged["sql"]["text"])
    assert {name for name, _ in found} == {"sql"} and "".join(text for _, text in found) == whole.text


def test_a_tool_call(stack: Stack) -> None:
    ours, base = [
        chat(stack.base_url, model, tools=TOOLS, tool_choice=NAMED, **TIGHT | GREEDY) for model in ("sql", MODEL)
    ]
    (called,) = ours["message"]["tool_calls"]
    assert called["function"]["name"] == "weather"
    _is_of_the_form(json.loads(called["function"]["arguments"]))
    assert scores(ours) != scores(base)


def test_an_answer_in_a_form(stack: Stack) -> None:
    ours, base = [
        chat(stack.base_url, model, response_format=JSON_SCHEMA, **TIGHT | GREEDY) for model in ("sql", MODEL)
    ]
    _is_of_the_form(json.loads(ours["message"]["content"]))
    assert scores(ours) != scores(base)


def _is_of_the_form(found: dict[str, Any]) -> None:
    assert found.keys() == {"city", "days"} and found["city"] in ("Oslo", "Lima") and 1 <= found["days"] <= 9


def test_reasoning(stack: Stack, model: Path) -> None:
    """By an API process that looks for it, over the same workers."""
    text = chat(stack.base_url, "sql", structured_outputs=THOUGHTS)["message"]["content"]
    thought, response = re.fullmatch("Here is my thought process:(.*)Here is my response:(.*)", text).groups()  # type: ignore[union-attr]
    with second_api(stack.redis_url, model, **GRANITE) as url:
        ours, base = [chat(url, name, structured_outputs=THOUGHTS) for name in ("sql", MODEL)]
    assert (ours["message"]["reasoning"], ours["message"]["content"]) == (thought, response)
    assert thought.strip() and response.strip()
    assert base["message"]["reasoning"] and scores(ours) != scores(base)


def test_the_other_apis(stack: Stack) -> None:
    """All say what chat says."""
    said = stack.client.chat.completions.create(
        model="sql",
        messages=[{"role": "user", "content": "What is in the garden?"}],
        max_tokens=12,
        temperature=0,
    )
    text = said.choices[0].message.content
    response = stack.client.responses.create(
        model="sql", input="What is in the garden?", max_output_tokens=12, temperature=0
    )
    assert (response.model, response.output_text) == ("sql", text)
    body = {"model": "sql", "max_tokens": 12, "temperature": 0}
    conversation = [{"role": "user", "content": "What is in the garden?"}]
    message = call(stack, "POST", "/v1/messages", body | {"messages": conversation}).json()
    assert (message["model"], message["content"]) == ("sql", [{"type": "text", "text": text}])
