"""What a client gets, in every topology."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.prompts import image, user
from tests.e2e.stack import Stack

QUESTION = user("What is in the garden?")


def test_whole_answer(stack: Stack) -> None:
    answer = stack.client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8, temperature=0)
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_says_the_same_as_the_whole(stack: Stack) -> None:
    ask = {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = stack.client.chat.completions.create(**ask)
    chunks = list(stack.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_stream_ends_with_done_and_is_not_held_back_by_proxies(stack: Stack) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{stack.base_url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no" and answer.headers["cache-control"] == "no-cache"
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_a_picture_matters(stack: Stack) -> None:
    answers = set()
    for seed in range(4):
        answer = stack.client.chat.completions.create(
            model="tiny", messages=user(image(seed), "What is in this image?"), max_tokens=16, temperature=0
        )
        answers.add(answer.choices[0].message.content)
    assert len(answers) == 4


def test_usage_counts_the_tokens_of_pictures(stack: Stack) -> None:
    """A 128 by 96 picture takes (128 / 32) * (96 / 32) = 12 tokens: 16-pixel patches, merged two by two."""
    ask = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    one = stack.client.chat.completions.create(messages=user(image(11), "?"), **ask).usage
    two = stack.client.chat.completions.create(messages=user(image(11), image(12), "?"), **ask).usage
    assert one.prompt_tokens_details.multimodal_tokens == {"image": 12}
    assert two.prompt_tokens_details.multimodal_tokens == {"image": 24}
    # Each picture brings its start and its end token too.
    assert two.prompt_tokens - one.prompt_tokens == 14
    stream = stack.client.chat.completions.create(
        messages=user(image(11), image(12), "?"), stream=True, stream_options={"include_usage": True}, **ask
    )
    usage = list(stream)[-1].usage
    assert usage.prompt_tokens == two.prompt_tokens
    assert usage.prompt_tokens_details.multimodal_tokens == {"image": 24}


def test_usage_counts_what_the_prefix_cache_had(stack: Stack) -> None:
    """Whole blocks of 32 tokens, and not those that a decode worker had from a prefill worker."""
    messages = user(f"{stack.topology}: how many apples are in the bowl on the table? " * 6)

    def counts() -> tuple[int, int, int]:
        ask: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0}
        *_, last = stack.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        details = last.usage.prompt_tokens_details
        return last.usage.prompt_tokens, details.cached_tokens, details.created_cache_tokens

    prompt, *new = counts()
    blocks = prompt // 32 * 32
    assert new == [0, blocks] and blocks > 0
    again = (prompt - 1) // 32 * 32
    assert counts() == (prompt, again, blocks - again)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(stack: Stack, stream: bool) -> None:
    """n > 1 gives each choice the tokens of its seed, seed + index."""
    ask = {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 12,
        "temperature": 1.0,
        "extra_body": {"ignore_eos": True},
    }
    alone = [
        stack.client.chat.completions.create(**ask, seed=40 + index).choices[0].message.content for index in range(3)
    ]
    if stream:
        texts = ["", "", ""]
        for chunk in stack.client.chat.completions.create(**ask, seed=40, n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = stack.client.chat.completions.create(**ask, seed=40, n=3)
        texts = [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    assert texts == alone
    assert len(set(texts)) > 1


def test_stop_string(stack: Stack) -> None:
    ask = {"model": "tiny", "messages": QUESTION, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = stack.client.chat.completions.create(**ask, max_tokens=24).choices[0].message.content
    stop = whole.split()[4]
    answer = stack.client.chat.completions.create(**ask, max_tokens=24, stop=[f" {stop}"]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == whole[: whole.index(f" {stop}")]


def test_request_id_comes_back(stack: Stack) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 1}
    assert stack.post(body, headers={"X-Request-Id": "night-shift-7"}).headers["x-request-id"] == "night-shift-7"
    assert stack.post(body, headers={"X-Request-Id": "a b<script>"}).headers["x-request-id"] != "a b<script>"


def test_models(stack: Stack) -> None:
    assert [model.id for model in stack.client.models.list()] == ["tiny"]


def test_health_and_metrics(stack: Stack) -> None:
    assert httpx.get(f"{stack.base_url}/health/live").status_code == 200
    ready = httpx.get(f"{stack.base_url}/health/ready")
    assert ready.status_code == 200 and ready.json()["status"] == "ready"
    before = _metric(stack, 'trivet_requests_total{outcome="ok"}')
    stack.client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=1)
    assert _metric(stack, 'trivet_requests_total{outcome="ok"}') == before + 1
    assert _metric(stack, 'trivet_workers{role="decode"}') == 1


def _metric(stack: Stack, name: str) -> float:
    lines = httpx.get(f"{stack.base_url}/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)
