"""Tool calls with the openai client. The tiny model makes none of its own accord, so they are demanded."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "Is it warm in Lima?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture
def ask(model_name: str, short_json: dict[str, int]) -> dict[str, Any]:
    return {
        "model": model_name,
        "messages": QUESTION,
        "max_tokens": 150,
        "temperature": 0,
        "logit_bias": short_json,
        "parallel_tool_calls": False,  # or it makes calls until its length is used up
    }


@pytest.fixture
def tools(weather_schema: dict[str, Any]) -> Any:
    """Strict ones: of others only the name is kept to."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    clock = {"name": "clock", "parameters": nothing, "strict": True}
    weather = {"name": "weather", "description": "The weather.", "parameters": weather_schema, "strict": True}
    return [{"type": "function", "function": one} for one in (weather, clock)]


#: Of answers without a call.
SHORT = {"max_tokens": 12}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def arguments_of(call: Any) -> Weather:
    assert call.id and call.type == "function" and call.function.name == "weather"
    return Weather.model_validate_json(call.function.arguments)


def test_a_named_tool(client: OpenAI, ask: dict[str, Any], tools: Any) -> None:
    answer = client.chat.completions.create(**ask, tools=tools, tool_choice=NAMED)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert arguments_of(call)
    assert not answer.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_stream_says_the_same(client: OpenAI, ask: dict[str, Any], tools: Any, choice: Any) -> None:
    wanted = {"tools": tools[:1], "tool_choice": choice}
    answer = client.chat.completions.create(**ask, **wanted).choices[0]
    (call,) = answer.message.tool_calls or ()
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, **wanted, stream=True)]
    deltas = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert {one.index for one in deltas} == {0}
    assert [one.function.name for one in deltas if one.function and one.function.name] == ["weather"]
    assert len([one.id for one in deltas if one.id]) == 1 and deltas[0].id
    text = "".join(one.function.arguments or "" for one in deltas if one.function)
    assert json.loads(text) == json.loads(call.function.arguments)
    assert chunks[-1].finish_reason == answer.finish_reason
    assert arguments_of(call)


def test_required_tools_are_called(client: OpenAI, ask: dict[str, Any], tools: Any) -> None:
    answer = client.chat.completions.create(**ask, tools=tools, tool_choice="required").choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    assert [call.function.name in ("weather", "clock") for call in answer.message.tool_calls] == [True]


def test_no_tool_is_called_unasked(client: OpenAI, ask: dict[str, Any], tools: Any) -> None:
    for choice in ("none", "auto"):
        answer = client.chat.completions.create(**ask | SHORT, tools=tools, tool_choice=choice).choices[0]
        assert not answer.message.tool_calls and answer.message.content
        assert answer.finish_reason in ("stop", "length")


def test_a_tool_of_a_pydantic_model(client: OpenAI, ask: dict[str, Any]) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    answer = client.chat.completions.parse(**ask, tools=[tool], tool_choice=NAMED)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**ask, tools=[tool], tool_choice=NAMED) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_a_tools_result_goes_back(client: OpenAI, ask: dict[str, Any], tools: Any) -> None:
    message = client.chat.completions.create(**ask, tools=tools, tool_choice=NAMED).choices[0].message
    (call,) = message.tool_calls or ()
    history = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}]
    ask |= SHORT
    answer = client.chat.completions.create(**ask | {"messages": history}, tools=tools)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    shorter = client.chat.completions.create(**ask | {"messages": [*QUESTION, message]}, tools=tools).usage
    assert shorter is not None and answer.usage.prompt_tokens > shorter.prompt_tokens


def test_a_tool_that_was_not_offered(client: OpenAI, ask: dict[str, Any], tools: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask, tools=tools[1:], tool_choice=NAMED)
    assert refused.value.type == "invalid_request_error"
