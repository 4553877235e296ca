"""Streams whose tokens come many at a time, as they do where the API is behind: nothing is lost, all is in order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.serving import Surface, chunks, events, spoken

SAID = (
    "<think>hm hm</think>Wait."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
)
CALLS = [("weather", {"city": "Oslo"}), ("time", {"city": "Rome"})]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=[1, 2, 3, 7, 20, 1000])
def coalesced(request: pytest.FixtureRequest, parsing: Surface) -> Surface:
    """Answers with two calls, so many tokens at a time."""
    steps, size = spoken(parsing.tokenizer, SAID), request.param
    parsing.pipeline.deltas = [sum(steps[at : at + size], []) for at in range(0, len(steps), size)]
    return parsing


async def test_chat(coalesced: Surface) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name, _ in CALLS]
    choices = [one["choices"][0] for one in chunks((await coalesced.chat(tools=tools, stream=True)).text)]
    deltas = [one["delta"] for one in choices]
    assert "".join(one.get("reasoning") or "" for one in deltas) == "hm hm"
    assert "".join(one.get("content") or "" for one in deltas) == "Wait."
    assert _calls(deltas) == CALLS
    *rest, last = choices
    assert all(one["finish_reason"] is None for one in rest)
    # OpenAI's client ends no call that begins in the chunk with the finish reason.
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


def _calls(deltas: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    parts = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert [one["index"] for one in parts] == sorted(one["index"] for one in parts)
    found: list[tuple[str, Any]] = []
    for index in range(len(CALLS)):
        first, *rest = [one for one in parts if one["index"] == index]
        assert first["id"] and not any("id" in one or "name" in one["function"] for one in rest)
        arguments = "".join(one["function"].get("arguments") or "" for one in (first, *rest))
        found.append((first["function"]["name"], json.loads(arguments)))
    return found


async def test_messages(coalesced: Surface) -> None:
    tools = [{"name": name, "input_schema": PARAMETERS} for name, _ in CALLS]
    asked = {"model": "tiny", "max_tokens": 500, "messages": MESSAGES, "tools": tools, "stream": True}
    found = [one.data for one in events((await coalesced.post("/v1/messages", **asked)).text)]
    starts = [one["content_block"] for one in found if one["type"] == "content_block_start"]
    assert [one["type"] for one in starts] == ["thinking", "text", "tool_use", "tool_use"]
    texts = ["", "", "", ""]
    for one in found:
        if one["type"] == "content_block_delta":
            delta = one["delta"]
            texts[one["index"]] += delta.get("thinking") or delta.get("text") or delta.get("partial_json") or ""
    assert texts[:2] == ["hm hm", "Wait."]
    assert [(one["name"], json.loads(text)) for one, text in zip(starts[2:], texts[2:], strict=True)] == CALLS
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


async def test_responses(coalesced: Surface) -> None:
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name, _ in CALLS]
    found = [
        one.data for one in events((await coalesced.post("/v1/responses", input="hi", tools=tools, stream=True)).text)
    ]
    deltas: dict[str, str] = {}
    for one in found:
        if one["type"].endswith(".delta"):
            deltas[one["type"]] = deltas.get(one["type"], "") + one["delta"]
    assert deltas["response.reasoning_text.delta"] == "hm hm"
    assert deltas["response.output_text.delta"] == "Wait."
    assert deltas["response.function_call_arguments.delta"] == "".join(json.dumps(city) for _, city in CALLS)
    output = found[-1]["response"]["output"]
    assert [one["type"] for one in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [(one["name"], json.loads(one["arguments"])) for one in output[2:]] == CALLS
