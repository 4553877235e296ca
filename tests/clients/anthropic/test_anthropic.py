"""Anthropic's messages with its own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "Is it warm in Lima?"}]


class Weather(BaseModel):
    city: Literal["Oslo", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[Anthropic]:
    """Without retries: a failure must show."""
    with Anthropic(base_url=server_url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def ask(model_name: str) -> dict[str, Any]:
    """The client has no parameters for sampling any more, the API has."""
    return {"model": model_name, "messages": QUESTION, "max_tokens": 12, "extra_body": {"temperature": 0}}


@pytest.fixture
def tools(ask: dict[str, Any], weather_schema: dict[str, Any]) -> dict[str, Any]:
    """A request that must be answered by one call. There is no `logit_bias` here: greedily the random model writes
    blanks into the JSON without end, so every token that may come is made about as likely as the others."""
    tool = {"name": "weather", "description": "The weather.", "input_schema": weather_schema, "strict": True}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return ask | {"tools": [tool], "tool_choice": choice, "max_tokens": 1500, "extra_body": {"temperature": 2}}


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(client: Anthropic, ask: dict[str, Any]) -> None:
    message = client.messages.create(**ask)
    assert (message.type, message.role, message.model) == ("message", "assistant", ask["model"])
    assert text_of(message) and message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 12


def test_a_stream_says_the_same(client: Anthropic, ask: dict[str, Any]) -> None:
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    kinds = [event.type for event in client.messages.create(**ask, stream=True)]
    assert (kinds[0], kinds[1], kinds[-2], kinds[-1]) == (
        "message_start",
        "content_block_start",
        "message_delta",
        "message_stop",
    )


def test_a_system_prompt_and_a_stop_sequence(client: Anthropic, ask: dict[str, Any]) -> None:
    plain = client.messages.create(**ask)
    told = client.messages.create(**ask, system=[{"type": "text", "text": "You are a helpful assistant."}])
    assert prompt_tokens(told.usage) > prompt_tokens(plain.usage)
    stop = text_of(plain).split()[2]
    cut = client.messages.create(**ask, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert stop not in text_of(cut) and text_of(plain).startswith(text_of(cut))


def test_tokens_are_counted(client: Anthropic, ask: dict[str, Any], red_png: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": red_png}
    seen: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]}]
    for messages in (QUESTION, seen):
        usage = client.messages.create(**ask | {"messages": messages}).usage
        counted = client.messages.count_tokens(model=ask["model"], messages=messages).input_tokens
        assert counted == prompt_tokens(usage)


def test_a_tool_call_and_its_result(client: Anthropic, ask: dict[str, Any], tools: dict[str, Any]) -> None:
    message = client.messages.create(**tools)
    assert message.stop_reason == "tool_use"
    (call,) = (block for block in message.content if block.type == "tool_use")
    assert call.id and call.name == "weather" and Weather.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
    turns = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**ask | {"messages": turns}, tools=tools["tools"], tool_choice={"type": "none"})
    assert text_of(answer)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=lambda one: one["type"])
def test_a_streamed_tool_call(client: Anthropic, tools: dict[str, Any], choice: Any) -> None:
    tools["tool_choice"] |= choice
    with client.messages.stream(**tools) as stream:
        parts = "".join(event.partial_json for event in stream if event.type == "input_json")
        (call,) = (block for block in stream.get_final_message().content if block.type == "tool_use")
    assert call.name == "weather"
    assert Weather.model_validate(call.input) == Weather.model_validate_json(parts)


def test_parsed_output(client: Anthropic, ask: dict[str, Any]) -> None:
    message = client.messages.parse(
        **ask | {"max_tokens": 1500, "extra_body": {"temperature": 2}}, output_format=Weather
    )
    assert isinstance(message.parsed_output, Weather)


def test_errors_have_what_the_client_reads(client: Anthropic, ask: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**ask | {"max_tokens": "many"})
    assert wrong.value.body["type"] == "error"  # type: ignore[index]
    assert wrong.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert "max_tokens" in wrong.value.message
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ask | {"model": "another"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_the_async_client_side_by_side(server_url: str, ask: dict[str, Any]) -> None:
    async def one(client: AsyncAnthropic) -> str:
        async with client.messages.stream(**ask) as stream:
            return await stream.get_final_text()

    async def all_of_them() -> list[str]:
        async with AsyncAnthropic(base_url=server_url, api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    first, *others = asyncio.run(all_of_them())
    assert first and others == [first] * 3
