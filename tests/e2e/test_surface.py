"""Every endpoint over real engines, in each topology."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError

from tests.e2e.prompts import image, picture, user
from tests.e2e.stack import Stack

QUESTION: Any = user("What is in the garden?")
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
ANTHROPIC: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}


def post(stack: Stack, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{stack.base_url}{path}", json=body, timeout=120)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def asked_of(seed: int) -> Any:
    """Chat messages with a picture."""
    return user(image(seed), "?")


def test_completions_of_text_and_of_its_tokens(stack: Stack) -> None:
    ask = {**GREEDY, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    text = "What do you see in the picture?"
    whole = stack.client.completions.create(prompt=text, **ask)
    tokens = post(stack, "/tokenize", prompt=text).json()["tokens"]
    assert stack.client.completions.create(prompt=tokens, **ask).choices[0].text == whole.choices[0].text
    assert post(stack, "/detokenize", tokens=tokens).json() == {"prompt": text}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(tokens), 12)
    chunks = list(
        stack.client.completions.create(prompt=text, stream=True, stream_options={"include_usage": True}, **ask)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (len(tokens), 12)


def test_completions_of_several_prompts(stack: Stack) -> None:
    prompts = ["Describe the image", "Tell me a story", "Music plays,"]
    ask = {**GREEDY, "max_tokens": 8}
    alone = [stack.client.completions.create(prompt=one, **ask) for one in prompts]
    answer = stack.client.completions.create(prompt=prompts, **ask)
    assert [one.text for one in answer.choices] == [one.choices[0].text for one in alone]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    texts = ["", "", ""]
    for chunk in stack.client.completions.create(prompt=prompts, stream=True, **ask):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [one.text for one in answer.choices]


def test_an_answer_to_a_prompt_that_no_vocabulary_has(stack: Stack) -> None:
    with pytest.raises(BadRequestError):
        stack.client.completions.create(model="tiny", prompt=[5, 10_000_000], max_tokens=2)
    assert stack.client.completions.create(model="tiny", prompt=[5], max_tokens=2).choices


def test_echo_scores_the_prompt(stack: Stack) -> None:
    answer = stack.client.completions.create(prompt="Two children play", echo=True, logprobs=2, max_tokens=2, **GREEDY)
    choice = answer.choices[0]
    assert choice.text.startswith("Two children play") and choice.logprobs is not None
    assert answer.usage is not None and choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert choice.logprobs.token_logprobs is not None
    first, *rest = choice.logprobs.token_logprobs
    assert first is None and all(one <= 0 for one in rest)


@pytest.mark.parametrize("topology", ["pd", "e_p_d"])
def test_scores_of_the_prompt_are_those_of_agg(stacks: Mapping[str, Stack], topology: str) -> None:
    """Twice: the second time its blocks are cached, and must not be used."""

    def scored(stack: Stack) -> list[dict[str, float]]:
        answer = post(stack, "/v1/chat/completions", messages=asked_of(23), max_tokens=3, prompt_logprobs=1, **GREEDY)
        found = answer.json()
        assert answer.status_code == 200 and found["usage"]["completion_tokens"] == 3, found
        scores = found["prompt_logprobs"]
        assert len(scores) == found["usage"]["prompt_tokens"] and scores[0] is None
        return [{token: one["logprob"] for token, one in place.items()} for place in scores[1:]]

    expected = scored(stacks["agg"])
    for _ in range(2):
        for here, there in zip(scored(stacks[topology]), expected, strict=True):
            shared = here.keys() & there.keys()
            assert shared and all(here[token] == pytest.approx(there[token], abs=1e-3) for token in shared)


def test_more_scores_than_one_message_may_hold_are_refused(stack: Stack) -> None:
    ask = {"prompt": [5] * 1000, "echo": True, "max_tokens": 1, **GREEDY}
    refused = post(stack, "/v1/completions", logprobs=10, **ask)
    assert refused.status_code == 400
    assert "stream.max_prompt_logprobs allows (10000)" in refused.json()["error"]["message"]
    assert post(stack, "/v1/completions", logprobs=9, **ask).status_code == 200


def test_responses_say_what_chat_says(stack: Stack) -> None:
    said = stack.client.chat.completions.create(messages=QUESTION, max_tokens=16, **GREEDY)
    answer = stack.client.responses.create(input="What is in the garden?", max_output_tokens=16, **GREEDY)
    assert answer.output_text == said.choices[0].message.content
    assert answer.usage is not None and said.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        said.usage.prompt_tokens,
        said.usage.completion_tokens,
    )
    with stack.client.responses.stream(input="What is in the garden?", max_output_tokens=16, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().usage is not None
    assert text == answer.output_text
    with pytest.raises(NotFoundError):
        stack.client.responses.retrieve(answer.id)


def test_a_response_to_a_picture(stack: Stack) -> None:
    said = stack.client.chat.completions.create(messages=asked_of(21), max_tokens=8, **GREEDY)
    parts = [{"type": "input_image", "image_url": picture(21), "detail": "auto"}, {"type": "input_text", "text": "?"}]
    answer = stack.client.responses.create(
        input=[{"role": "user", "content": parts}],  # type: ignore[list-item, misc]
        max_output_tokens=8,
        **GREEDY,
    )
    assert answer.output_text == said.choices[0].message.content
    assert answer.usage is not None and said.usage is not None
    assert answer.usage.input_tokens == said.usage.prompt_tokens
    assert answer.usage.input_tokens_details.multimodal_tokens == {"image": 12}  # type: ignore[attr-defined]


def test_messages_say_what_chat_says(stack: Stack) -> None:
    said = stack.client.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY)
    conversation = [{"role": "user", "content": "What is in the garden?"}]
    answer = post(stack, "/v1/messages", messages=conversation, **ANTHROPIC).json()
    assert answer["content"] == [{"type": "text", "text": said.choices[0].message.content}]
    count = post(stack, "/v1/messages/count_tokens", model="tiny", messages=conversation).json()
    usage = answer["usage"]
    assert sum(tokens for name, tokens in usage.items() if "input" in name) == count["input_tokens"]
    found = events(post(stack, "/v1/messages", messages=conversation, stream=True, **ANTHROPIC))
    assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
    text = "".join(one["delta"]["text"] for one in found if one["type"] == "content_block_delta")
    assert text == said.choices[0].message.content


def test_a_message_with_a_picture(stack: Stack) -> None:
    said = stack.client.chat.completions.create(messages=asked_of(22), max_tokens=12, **GREEDY)
    data = picture(22).partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    conversation = [{"role": "user", "content": [block, {"type": "text", "text": "?"}]}]
    count = post(stack, "/v1/messages/count_tokens", model="tiny", messages=conversation).json()
    answer = post(stack, "/v1/messages", messages=conversation, **ANTHROPIC).json()
    assert answer["content"][0]["text"] == said.choices[0].message.content
    assert said.usage is not None and count["input_tokens"] == said.usage.prompt_tokens


def test_structured_outputs_hold(stack: Stack) -> None:
    form = {"structured_outputs": {"regex": r'\{"colour": "(red|blue)", "count": [1-9]\}'}}
    ask: dict[str, Any] = {"max_tokens": 60, "extra_body": form, **GREEDY}
    whole = stack.client.chat.completions.create(messages=QUESTION, **ask).choices[0].message.content
    assert json.loads(whole)["colour"] in ("red", "blue")
    parts = stack.client.completions.create(prompt="hi", stream=True, **ask)
    assert json.loads("".join(part.choices[0].text for part in parts))["count"] > 0


def test_a_schema_that_takes_too_long_to_compile_is_refused_and_holds_nobody_up(stack: Stack) -> None:
    """Compiling it takes a minute. It is tried where it can be stopped, and no engine hears of it."""
    long = {"enum": ["x" * 20 + str(number) for number in range(15000)]}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": long}}
    ask: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 4}
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, stack, "/v1/chat/completions", response_format=form, **ask)
        served = 0
        while not slow.done():
            assert stack.client.chat.completions.create(**ask).choices
            served += 1
        answer = slow.result()
    assert answer.status_code == 400 and "api.grammar_timeout_s" in answer.json()["error"]["message"]
    assert served > 3


def test_logprobs_are_those_of_the_stream(stack: Stack) -> None:
    ask: dict[str, Any] = {"messages": QUESTION, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = stack.client.chat.completions.create(**ask).choices[0].logprobs.content
    parts = [chunk.choices[0] for chunk in stack.client.chat.completions.create(stream=True, **ask)]
    streamed = [one for part in parts if part.logprobs for one in part.logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in whole]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in whole], abs=1e-4)
    assert all(len(one.top_logprobs) == 3 for one in whole)


TIMED = {"X-Trivet-Timings": "1"}


@pytest.mark.parametrize("topology", ["agg", "pd", "e_p_d"])
def test_timings_say_who_did_what(stacks: Mapping[str, Stack], topology: str) -> None:
    stack = stacks[topology]

    def timed(**more: Any) -> dict[str, Any]:
        body = {"messages": asked_of(24), "max_tokens": 8, "ignore_eos": True, **GREEDY, **more}
        answer = httpx.post(f"{stack.base_url}/v1/chat/completions", json=body, headers=TIMED, timeout=120)
        if more:
            (found,) = [line for line in answer.text.splitlines() if line.startswith(": trivet-timings ")]
            return dict(json.loads(found.removeprefix(": trivet-timings ")))
        return dict(json.loads(answer.headers["x-trivet-timings"]))

    first, again = timed(), timed(stream=True)
    kinds = {role: {name.partition("@")[0] for name in names} for role, names in first["workers"].items()}
    split = topology != "agg"
    assert kinds == {
        "encode": {"encode"} if topology == "e_p_d" else set(),
        "prefill": {"prefill" if split else "agg"},
        "decode": {"decode" if split else "agg"},
    }
    assert (first["items"], first["embedding_hits"]) == (1, 0)
    assert (again["items"], again["embedding_hits"]) == (1, 1) and again["cached_tokens"] >= first["cached_tokens"]
    for one in (first, again):
        stages = [one[f"{stage}_ms"] for stage in ("queue", "encode", "prefill", "transfer", "decode", "other")]
        assert all(stage >= 0 for stage in stages)
        assert sum(stages) == pytest.approx(one["total_ms"], abs=0.1)
        assert one["prefill_ms"] > 0 and one["decode_ms"] > 0 and (one["transfer_ms"] > 0) == split
    assert "x-trivet-timings" not in stack.post({"messages": QUESTION, "max_tokens": 1, **GREEDY}).headers


def test_one_model(stack: Stack) -> None:
    assert stack.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError):
        stack.client.models.retrieve("another/model")
