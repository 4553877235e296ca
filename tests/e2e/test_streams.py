"""Transcripts of streams, event by event: their order, what may be said once, and that whole answers say the same."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e import sse
from tests.e2e.differences import found
from tests.e2e.stack import MODEL, Stack
from tests.e2e.varied_requests import (
    CHAT,
    CHATS,
    FORM,
    FUNCTION,
    GREEDY,
    JSON_SCHEMA,
    NAMED,
    SEEDED,
    TIGHT,
    TOOLS,
    Ask,
    chat,
    completion,
    message,
    response,
)

NO_USAGE: dict[str, Any] = {}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def post(stack: Stack, ask: Ask, timeout: float | None = None, **more: Any) -> httpx.Response:
    """The answer, or the stream's text. `timeout`: the request's deadline, in seconds."""
    headers = {} if timeout is None else {"X-Request-Timeout": str(timeout)}
    body = {"model": MODEL, **ask.body, **more}
    answer = httpx.post(f"{stack.base_url}{ask.path}", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200 or timeout, answer.text
    return answer


def streamed(stack: Stack, ask: Ask, **more: Any) -> list[Any]:
    return sse.chunks(post(stack, ask, stream=True, **more).text)


def of_choice(chunks: list[Any], index: int) -> list[Any]:
    return [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]


def said(choice: dict[str, Any]) -> dict[str, Any]:
    """What a choice, whole or put together, tells: less what only one of the two forms has."""
    message = choice.get("message") or {}
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    told = {"text": message.get("content") or choice.get("text") or "", "calls": [_call(one) for one in calls]}
    return told | {name: choice.get(name) for name in ("logprobs", "finish_reason", "stop_reason", "token_ids")}


def _call(function: dict[str, Any]) -> tuple[str, Any]:
    """A whole answer has the arguments parsed and written anew, a stream as the model wrote them."""
    return function["name"], json.loads(function["arguments"])


ASKS = {
    "text": chat(**GREEDY),
    "to its own end": CHATS["the end at once"],
    "two choices": chat(**SEEDED, n=2),
    "logprobs": chat(**GREEDY, logprobs=True, top_logprobs=2, return_token_ids=True),
    "logprobs of two choices": chat(**SEEDED, logprobs=True, top_logprobs=1, n=2),
    "a schema": chat(**TIGHT, tokens=60, response_format=JSON_SCHEMA),
    "tools": chat(**TIGHT, tokens=80, tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
    "a named tool": chat(**TIGHT, tokens=80, tools=TOOLS, tool_choice=NAMED),
    "calls of two choices": chat(**{**TIGHT, **SEEDED}, tokens=80, tools=TOOLS, tool_choice=NAMED, n=2),
    "completion": completion(**GREEDY),
    "completions of choices": completion(["Hello", "Music"], **SEEDED, n=2, logprobs=2),
    "completion and echo": completion(**GREEDY, echo=True, logprobs=1, tokens=4),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_transcript(stack: Stack, name: str) -> None:
    """The same request whole and in three streams, all at once."""
    ask = ASKS[name]
    with ThreadPoolExecutor(4) as pool:
        whole = pool.submit(post, stack, ask)
        streams = [pool.submit(streamed, stack, ask, **options) for options in (NO_USAGE, USAGE, CONTINUOUS)]
    answer = whole.result().json()
    for stream, options in zip(streams, (NO_USAGE, USAGE, CONTINUOUS), strict=True):
        _check(stream.result(), answer, options, is_chat=ask.path == CHAT)


def _check(chunks: list[Any], answer: dict[str, Any], options: dict[str, Any], *, is_chat: bool) -> None:
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in chunks}) == 1
    if options:
        last = chunks.pop()
        assert last["choices"] == [] and _counts(last["usage"]) == _counts(answer["usage"])
    assert all(one["choices"] for one in chunks)
    for index in range(len(answer["choices"])):
        _check_choice(of_choice(chunks, index), is_chat=is_chat)
    _check_running_usage(chunks, continuous=options is CONTINUOUS)
    together = sse.whole(chunks)
    assert list(found(*([said(one) for one in each["choices"]] for each in (together, answer)))) == []


def _counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def _check_choice(parts: list[Any], *, is_chat: bool) -> None:
    """The role comes first and once, the reason to end last and once."""
    if is_chat:
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in one["delta"] for one in parts[1:])
    assert all(one["finish_reason"] is None for one in parts[:-1])
    assert parts[-1]["finish_reason"] in ("stop", "length", "tool_calls")


def _check_running_usage(chunks: list[Any], *, continuous: bool) -> None:
    assert all((one.get("usage") is not None) == continuous for one in chunks)
    if continuous:
        for index in {one["choices"][0]["index"] for one in chunks}:
            counts = [one["usage"]["completion_tokens"] for one in chunks if one["choices"][0]["index"] == index]
            assert counts == sorted(counts) and counts[-1] > 0


def test_a_stop_string_that_ends_in_another_chunk(stack: Stack) -> None:
    """No part of it is sent, although its first tokens were there before the others."""
    whole = post(stack, chat(**GREEDY)).json()["choices"][0]["message"]["content"]
    words = whole.split()
    stop = f"{words[4][-2:]} {words[5]} {words[6][:2]}"
    *parts, last = of_choice(streamed(stack, chat(**GREEDY), stop=[stop]), 0)
    assert len(parts) > 3
    text = "".join(one["delta"]["content"] for one in [*parts, last])
    assert text == whole[: whole.index(stop)]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_a_call_that_is_cut_short_is_the_beginning_of_it(stack: Stack) -> None:
    def arguments(tokens: int) -> tuple[str, str, int]:
        ask = chat(**TIGHT, tokens=tokens, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        answer = sse.whole(streamed(stack, ask, **USAGE))
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        return call["function"]["arguments"], choice["finish_reason"], answer["usage"]["completion_tokens"]

    whole, ended, tokens = arguments(80)
    # The last are the end of the call, its mark and the end of the answer.
    cut, why, _ = arguments(tokens - 20)
    assert json.loads(whole) and whole.startswith(cut) and 0 < len(cut) < len(whole)
    assert (ended, why) == ("tool_calls", "length")


#: What Anthropic's API has in place of `ignore_eos`.
LONG = {"type": "array", "items": {"enum": ["Oslo", "Lima"]}, "minItems": 600}
ENDLESS: dict[str, Ask] = {
    "chat": chat(**GREEDY, tokens=1900, ignore_eos=True),
    "chat of two choices": chat(**SEEDED, tokens=1900, ignore_eos=True, n=2),
    "completion": completion(**GREEDY, tokens=1900, ignore_eos=True),
    "response": response(tokens=1900, ignore_eos=True),
    "message": message(tokens=1900, output_config={"format": {"type": "json_schema", "schema": LONG}}),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_error_in_the_middle(stack: Stack, name: str) -> None:
    """Of a deadline that passes after the first token. On a slow machine the first token takes its time."""
    for seconds in (0.5, 1, 2, 4, 8):
        answer = post(stack, ENDLESS[name], timeout=seconds, stream=True)
        if answer.status_code == 200:
            break
    events = sse.events(answer.text)
    if name == "message":
        assert [one.kind for one in events[-2:]] == ["content_block_delta", "error"]
        assert events[-1].data["error"]["message"]
        return
    if name == "response":
        assert [one.kind for one in events[-2:]] == ["error", "response.failed"]
        assert events[-2].data["code"] == "deadline_exceeded"
        return
    *chunks, error = sse.chunks(answer.text)
    assert error.keys() == {"error"} and error["error"]["code"] == "deadline_exceeded"
    assert any(one["choices"] for one in chunks) and not any(
        choice["finish_reason"] for one in chunks for choice in one["choices"]
    )


CALL = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "parallel_tool_calls": False}
FORMED = {"text": {"format": {"type": "json_schema", "name": "it", "schema": FORM, "strict": True}}}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
CALL_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (response(), TEXT_EVENTS),
        (response(tokens=60, **TIGHT, **FORMED), TEXT_EVENTS),
        (response(tokens=80, **TIGHT, **CALL), CALL_EVENTS),
    ],
    ids=["text", "form", "call"],
)
def test_the_events_of_a_response(stack: Stack, ask: Ask, expected: list[str]) -> None:
    answer = post(stack, ask).json()
    events = sse.events(post(stack, ask, stream=True).text)
    assert [one.data["sequence_number"] for one in events] == list(range(len(events)))
    assert [one.data["type"] for one in events] == [one.kind for one in events]
    parts = sse.merged(events)
    assert [one["type"] for one in parts] == expected
    told = next(one["delta"] for one in parts if one["type"].endswith(".delta"))
    (item,) = answer["output"]
    if item["type"] == "function_call":
        assert json.loads(told) == json.loads(item["arguments"])
    else:
        assert told == item["content"][0]["text"]
    (last,) = events[-1].data["response"]["output"]
    assert last.keys() == item.keys() and last["status"] == item["status"] == "completed"
    usages = [one["usage"] for one in (events[-1].data["response"], answer)]
    assert usages[0]["output_tokens"] == usages[1]["output_tokens"] > 0
    assert usages[0]["input_tokens"] == usages[1]["input_tokens"] > 0


TOOL = {"name": "weather", "input_schema": FORM, "strict": True}


@pytest.mark.parametrize(
    ("ask", "block", "delta"),
    [
        (message(), "text", "text"),
        (message(tokens=150, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}), "tool_use", "input_json"),
    ],
    ids=["text", "call"],
)
def test_the_events_of_a_message(stack: Stack, ask: Ask, block: str, delta: str) -> None:
    answer = post(stack, ask).json()
    events = sse.events(post(stack, ask, stream=True).text)
    assert [one.data["type"] for one in events] == [one.kind for one in events]
    begin, start, part, stop, end, last = sse.merged(events)
    kinds = [one["type"] for one in (begin, start, part, stop, end, last)]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert begin["message"]["content"] == [] and begin["message"]["stop_reason"] is None
    assert {start["index"], part["index"], stop["index"]} == {0}
    assert (start["content_block"]["type"], part["delta"]["type"]) == (block, f"{delta}_delta")
    (content,) = answer["content"]
    if block == "text":
        assert part["delta"]["text"] == content["text"]
    else:
        assert json.loads(part["delta"]["partial_json"]) == content["input"]
    assert end["delta"]["stop_reason"] == answer["stop_reason"]
    assert end["usage"]["output_tokens"] == answer["usage"]["output_tokens"]
