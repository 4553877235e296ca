"""litellm, by its OpenAI-compatible provider and by its provider for vLLM."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

QUESTION = [{"role": "user", "content": "Is it warm in Lima?"}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def ask(request: pytest.FixtureRequest, server_url: str, model_name: str) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{model_name}",
        "api_base": f"{server_url}/v1",
        "api_key": "none",
        "messages": QUESTION,
        "max_tokens": 12,
        "temperature": 0,
        "num_retries": 0,
        "timeout": 60,
    }


@pytest.fixture
def tools(ask: dict[str, Any], weather_schema: dict[str, Any], short_json: dict[str, int]) -> dict[str, Any]:
    """A request that must be answered by one call."""
    weather = {"name": "weather", "parameters": weather_schema, "strict": True}
    tool = {"type": "function", "function": weather}
    more = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": short_json}
    return ask | more | {"max_tokens": 150}


def test_a_whole_answer(ask: dict[str, Any]) -> None:
    answer = litellm.completion(**ask)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same(ask: dict[str, Any]) -> None:
    whole = litellm.completion(**ask)
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert built.choices[0].message.content == text
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def test_a_tool_call(tools: dict[str, Any]) -> None:
    choice = litellm.completion(**tools).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.id and call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    if not tools["model"].startswith("hosted_vllm/"):  # it does not send `strict`
        assert arguments.keys() == {"city", "unit"}
    built = litellm.stream_chunk_builder(list(litellm.completion(**tools, stream=True)))
    (streamed,) = built.choices[0].message.tool_calls
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("weather", arguments)
    assert built.choices[0].finish_reason == "tool_calls"


def test_a_json_schema(ask: dict[str, Any], weather_schema: dict[str, Any], short_json: dict[str, int]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": weather_schema, "strict": True}}
    answer = litellm.completion(**ask | {"max_tokens": 100}, response_format=form, logit_bias=short_json)
    assert json.loads(answer.choices[0].message.content).keys() == {"city", "unit"}


def test_a_picture(ask: dict[str, Any], red_png: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{red_png}"}}
    seen = [{"role": "user", "content": [picture, {"type": "text", "text": "What is in this picture?"}]}]
    assert litellm.completion(**ask | {"messages": seen}).choices[0].message.content


def test_text_completions(ask: dict[str, Any]) -> None:
    ask["model"] = ask["model"].replace("openai/", "text-completion-openai/")
    del ask["messages"]
    answer = litellm.text_completion(**ask, prompt="A red circle")
    assert answer.choices[0].text


def test_errors_are_told_apart(ask: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**ask | {"temperature": -1})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**ask | {"model": ask["model"].replace("tiny", "another")})
    long = [{"role": "user", "content": "garden " * 3000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**ask | {"messages": long})


def test_async(ask: dict[str, Any]) -> None:
    async def one() -> str:
        stream = await litellm.acompletion(**ask, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one() for _ in range(4)))

    first, *others = asyncio.run(all_of_them())
    assert first and others == [first] * 3
