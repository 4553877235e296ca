"""Chat completions with the openai client."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "What is in the garden?"}]


class Shape(BaseModel):
    colour: Literal["red", "blue"]
    corners: Literal[3, 4]


@pytest.fixture
def ask(model_name: str) -> dict[str, Any]:
    return {"model": model_name, "messages": QUESTION, "max_tokens": 12, "temperature": 0}


def test_a_whole_answer(client: OpenAI, ask: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**ask)
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", ask["model"])
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content and choice.finish_reason in ("stop", "length")
    assert choice.message.tool_calls is None and choice.message.refusal is None
    assert answer.usage is not None and answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same(client: OpenAI, ask: dict[str, Any]) -> None:
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    *rest, last = chunks
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert rest[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in rest)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in rest]
    assert reasons[-1] == whole.choices[0].finish_reason and reasons[:-1] == [None] * (len(reasons) - 1)


def test_the_clients_own_stream(client: OpenAI, ask: dict[str, Any]) -> None:
    """It takes an answer that was cut for an error: here one that a stop string ends."""
    ask |= {"max_tokens": 500, "stop": "e"}
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_parsed_answers(client: OpenAI, ask: dict[str, Any], short_json: dict[str, int]) -> None:
    ask |= {"max_tokens": 100, "logit_bias": short_json}
    answer = client.chat.completions.parse(**ask, response_format=Shape)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Shape) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**ask, response_format=Shape) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_an_answer_that_was_cut_is_not_parsed(client: OpenAI, ask: dict[str, Any]) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**ask | {"max_tokens": 3}, response_format=Shape)


def test_a_picture(client: OpenAI, ask: dict[str, Any], red_png: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{red_png}"}}
    seen = [{"role": "user", "content": [picture, {"type": "text", "text": "What is in this picture?"}]}]
    without = client.chat.completions.create(**ask).usage
    answer = client.chat.completions.create(**ask | {"messages": seen})
    assert answer.choices[0].message.content
    assert answer.usage is not None and without is not None and answer.usage.prompt_tokens > without.prompt_tokens


def test_several_choices_with_logprobs(client: OpenAI, ask: dict[str, Any]) -> None:
    wanted = {"n": 3, "seed": 5, "temperature": 1, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**ask | wanted)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert all(len(token.top_logprobs) >= 2 and token.logprob <= 0 for token in choice.logprobs.content)
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**ask | wanted, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.delta.content or ""
    assert streamed == texts


def test_null_and_unknown_fields(client: OpenAI, ask: dict[str, Any]) -> None:
    plain = client.chat.completions.create(**ask).choices[0].message.content
    nulls: Any = dict.fromkeys(("stop", "seed", "tools", "top_p", "response_format", "user", "parallel_tool_calls"))
    answer = client.chat.completions.create(**ask, **nulls, extra_body={"no_such_field": 1}, metadata={"a": "b"})
    assert answer.choices[0].message.content == plain


def test_headers_of_an_answer(client: OpenAI, ask: dict[str, Any]) -> None:
    raw = client.chat.completions.with_raw_response.create(**ask, extra_headers={"X-Request-Id": "from-a-client"})
    assert raw.headers["x-request-id"] == "from-a-client"
    assert raw.parse()._request_id == "from-a-client"


def test_errors_have_what_the_client_reads(client: OpenAI, ask: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**ask | {"temperature": -1})
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_request")
    assert wrong.value.type == "invalid_request_error" and "temperature" in wrong.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**ask | {"model": "another"})
    assert missing.value.code == "model_not_found" and missing.value.request_id


def test_the_async_client_side_by_side(server_url: str, ask: dict[str, Any]) -> None:
    async def one(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(**ask, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    first, *others = asyncio.run(all_of_them())
    assert first and others == [first] * 7


def test_a_stream_that_is_left(client: OpenAI, ask: dict[str, Any]) -> None:
    with client.chat.completions.create(**ask | {"max_tokens": 1000}, stream=True) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert client.chat.completions.create(**ask).choices[0].message.content
