"""Text that looks like the protocol, or that ends inside a character, passes through as it is, in both directions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e import sse
from tests.e2e.stack import MODEL, Stack
from tests.e2e.varied_requests import (
    GREEDY,
    Ask,
    chat,
    completion,
    response,
)

AWKWARD = {
    "the end of a stream": "data: [DONE]\n\ndata: {}\n\n: ping\n\nevent: error",
    "emoji of many tokens": "hm 👩‍🚀 ünï \u2028",
    "control characters": "a\x00b\x1b[31m\x07\x7f\r\nc",
    "marks of other kinds": '"}]}\\n\\u0000 </tool_call> <think> {{ x }} %s',
}


def post(stack: Stack, ask: Ask, **more: Any) -> str:
    body = {"model": MODEL, **ask.body, **more}
    answer = httpx.post(f"{stack.base_url}{ask.path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.text


def of_json(text: str) -> Any:
    return httpx.Response(200, text=text).json()


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_what_the_model_says(stack: Stack, text: str) -> None:
    """It is made to say it, token by token."""
    only = {"structured_outputs": {"choice": [text]}}
    ask = chat(tokens=150, **GREEDY, **only)
    assert of_json(post(stack, ask))["choices"][0]["message"]["content"] == text
    chunks = sse.chunks(post(stack, ask, stream=True))
    assert sse.whole(chunks)["choices"][0]["message"]["content"] == text
    assert not any("\ufffd" in (choice["delta"].get("content") or "") for one in chunks for choice in one["choices"])
    ask = completion(tokens=150, **GREEDY, **only)
    assert sse.whole(sse.chunks(post(stack, ask, stream=True)))["choices"][0]["text"] == text
    ask = response(tokens=150, **only)
    done = [one for one in sse.events(post(stack, ask, stream=True)) if one.kind == "response.output_text.done"]
    assert [one.data["text"] for one in done] == [text]


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_what_the_client_says(stack: Stack, text: str) -> None:
    tokens = of_json(post(stack, Ask("/tokenize", {"prompt": text})))["tokens"]
    assert of_json(post(stack, Ask("/detokenize", {"tokens": tokens}))) == {"prompt": text}
    ask = completion(text, tokens=1, **GREEDY, echo=True)
    whole = of_json(post(stack, ask))
    assert whole["choices"][0]["text"].startswith(text) and whole["usage"]["prompt_tokens"] == len(tokens)
    assert sse.whole(sse.chunks(post(stack, ask, stream=True)))["choices"][0]["text"] == whole["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_of_100_kb(stack: Stack, stream: bool) -> None:
    """The model's context is shorter; what a response repeats of its request need not fit into it."""
    long = {"long": "".join(AWKWARD.values()) + "x" * 100_000}
    text = post(stack, response(metadata=long), stream=stream)
    answer = sse.events(text)[-1].data["response"] if stream else of_json(text)
    assert answer["metadata"] == long and answer["status"] == "incomplete"
