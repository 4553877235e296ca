"""Completions, responses and models with the openai client."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel


class Shape(BaseModel):
    colour: Literal["red", "blue"]
    corners: Literal[3, 4]


class Weather(BaseModel):
    city: Literal["Oslo", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture
def ask(model_name: str) -> dict[str, Any]:
    return {"model": model_name, "input": "Is it warm in Lima?", "max_output_tokens": 12, "temperature": 0}


def test_models(client: OpenAI, model_name: str) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.object) == (model_name, "model")
    assert client.models.retrieve(model_name).created > 0
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("another")
    assert missing.value.code == "model_not_found"


def test_completions(client: OpenAI, model_name: str) -> None:
    ask: dict[str, Any] = {"model": model_name, "max_tokens": 12, "temperature": 0, "prompt": ["A red", "The old"]}
    whole = client.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and all(texts)


def test_a_response(client: OpenAI, ask: dict[str, Any]) -> None:
    answer = client.responses.create(**ask)
    assert answer.output_text and answer.status in ("completed", "incomplete")
    assert answer.usage is not None and 0 < answer.usage.output_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_the_events_of_a_response(client: OpenAI, ask: dict[str, Any]) -> None:
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    with client.responses.stream(**ask) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == text


def test_a_parsed_response(client: OpenAI, ask: dict[str, Any], short_json: dict[str, int]) -> None:
    ask |= {"max_output_tokens": 100, "extra_body": {"logit_bias": short_json}}
    answer = client.responses.parse(**ask, text_format=Shape)
    assert isinstance(answer.output_parsed, Shape)
    with client.responses.stream(**ask, text_format=Shape) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_a_tool_in_a_response(
    client: OpenAI, ask: dict[str, Any], weather_schema: dict[str, Any], short_json: dict[str, int]
) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": weather_schema, "strict": True}
    ask |= {"max_output_tokens": 150, "parallel_tool_calls": False, "extra_body": {"logit_bias": short_json}}
    wanted = ask | {"tools": [tool], "tool_choice": "required"}
    calls = [item for item in client.responses.create(**wanted).output if item.type == "function_call"]
    assert calls and all(call.name == "weather" and call.call_id for call in calls)
    arguments = Weather.model_validate_json(calls[0].arguments)
    events = list(client.responses.create(**wanted, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert Weather.model_validate_json(done[0].arguments) == arguments
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts).startswith(done[0].arguments)


def test_a_conversation_as_input(client: OpenAI, ask: dict[str, Any], red_png: str) -> None:
    first = client.responses.create(**ask)
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{red_png}", "detail": "auto"}
    turns: Any = [
        {"role": "user", "content": ask["input"]},
        *first.output,
        {"role": "user", "content": [picture, {"type": "input_text", "text": "And here?"}]},
    ]
    answer = client.responses.create(**ask | {"input": turns})
    assert answer.output_text and answer.usage is not None and first.usage is not None
    assert answer.usage.input_tokens > first.usage.total_tokens


def test_no_response_is_stored(client: OpenAI, ask: dict[str, Any]) -> None:
    answer = client.responses.create(**ask)
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**ask, previous_response_id=answer.id)
    assert missing.value.param == "previous_response_id"
