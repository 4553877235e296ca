"""Transcripts of answers that reason first: a model with random weights never does, so the engine is a scripted one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.serving import Surface, chunks, events, spoken

SAID = "<think>hm 👩‍🚀 data: [DONE]\n\n</think>It is Oslo."
THOUGHT, ANSWER = "hm 👩‍🚀 data: [DONE]\n\n", "It is Oslo."
KNOWN: dict[str, Any] = {"prompt_token_ids": [1] * 33, "cached_tokens": 16}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
def thinking(parsing: Surface) -> Surface:
    parsing.pipeline.deltas = spoken(parsing.tokenizer, SAID, **KNOWN)
    return parsing


@pytest.mark.parametrize("n", [1, 2])
async def test_chat(thinking: Surface, n: int) -> None:
    whole = (await thinking.chat(n=n)).json()
    *found, last = chunks((await thinking.chat(n=n, stream=True, **USAGE)).text)
    assert len({(one["id"], one["created"], one["model"]) for one in found}) == 1
    for index, choice in enumerate(whole["choices"]):
        first, *rest = [one for chunk in found for one in chunk["choices"] if one["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert [one["finish_reason"] for one in rest] == [None] * (len(rest) - 1) + ["stop"]
        kinds = [kind for one in rest for kind in ("reasoning", "content") if one["delta"].get(kind)]
        assert kinds == sorted(kinds, reverse=True), "reasoning after the answer began"
        assert kinds.count("reasoning") > 2 < kinds.count("content")
        for kind, text in (("reasoning", THOUGHT), ("content", ANSWER)):
            assert "".join(one["delta"].get(kind) or "" for one in rest) == text == choice["message"][kind]
    assert last["choices"] == [] and last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert _counts(last["usage"]) == _counts(whole["usage"])


def _counts(usage: dict[str, Any]) -> tuple[Any, ...]:
    """Less the reasoning tokens: of a stream vLLM's parser leaves out those that end inside a character."""
    return tuple(usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))


async def test_responses(thinking: Surface) -> None:
    whole = (await thinking.post("/v1/responses", input="hi")).json()
    found = events((await thinking.post("/v1/responses", input="hi", stream=True)).text)
    assert [one.data["sequence_number"] for one in found] == list(range(len(found)))
    kinds = [one.kind.removeprefix("response.") for one in found]
    once = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    for kind, text in (("reasoning_text", THOUGHT), ("output_text", ANSWER)):
        assert "".join(one.data["delta"] for one in found if one.kind == f"response.{kind}.delta") == text
    told = [[one["content"][0]["text"] for one in answer["output"]] for answer in (whole, found[-1].data["response"])]
    assert told == [[THOUGHT, ANSWER]] * 2


async def test_messages(thinking: Surface) -> None:
    ask = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
    whole = (await thinking.post("/v1/messages", **ask)).json()
    found = events((await thinking.post("/v1/messages", **ask, stream=True)).text)
    kinds = [one.kind for one in found]
    once = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block, *block, "message_delta", "message_stop"]
    deltas = [(one.data["index"], one.data["delta"]) for one in found if one.kind == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for index, delta in deltas if index == 0) == THOUGHT
    assert "".join(delta["text"] for index, delta in deltas if index == 1) == ANSWER
    assert [one.get("thinking", one.get("text")) for one in whole["content"]] == [THOUGHT, ANSWER]
