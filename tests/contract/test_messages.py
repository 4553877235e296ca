"""Anthropic's API over vLLM's serving layer."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from app.errors.serving import NoWorker, WorkerLost
from tests.contract.serving import Event, Surface, answer, events, spoken
from tests.pictures import encoded

PATH = "/v1/messages"
KNOWN: dict[str, Any] = {"prompt_token_ids": [1] * 33, "cached_tokens": 16}
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded()).decode()},
}


def kinds(found: list[Event]) -> list[str]:
    assert [one.data["type"] for one in found] == [one.kind for one in found]
    return [one.kind for one in found]


async def test_a_whole_answer(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", " b", **KNOWN)
    found = (await surface.post(PATH, **ASK, system="be brief", metadata={"user_id": "u"}, top_k=None)).json()
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    assert found["content"] == [{"type": "text", "text": "a b"}]
    assert found["stop_reason"] == "end_turn"
    # Anthropic's input tokens are those that no cache had.
    assert found["usage"] == {"input_tokens": 17, "cache_read_input_tokens": 16, "output_tokens": 2}
    (job,) = surface.pipeline.jobs
    assert job.params["max_tokens"] == 100 and "mine" in job.request_id


async def test_a_stream(surface: Surface) -> None:
    surface.pipeline.deltas = spoken(surface.tokenizer, "a 👩‍🚀\x00 data: [DONE]\n\n b", **KNOWN)
    found = events((await surface.post(PATH, **ASK, stream=True)).text)
    names = kinds(found)
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    text = "".join(one.data["delta"]["text"] for one in found if one.kind == "content_block_delta")
    assert text == "a 👩‍🚀\x00 data: [DONE]\n\n b"
    assert found[0].data["message"]["role"] == "assistant" and found[0].data["message"]["content"] == []
    assert found[-2].data["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2].data["usage"] == {
        "input_tokens": 17, "cache_read_input_tokens": 16, "output_tokens": len(surface.pipeline.deltas),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("finish", "stop", "told"),
    [
        ("length", None, ("max_tokens", None)),
        ("stop", "###", ("stop_sequence", "###")),
        ("stop", 7, ("end_turn", None)),
    ],
)
async def test_why_it_stopped(surface: Surface, finish: str, stop: Any, told: tuple[str, Any]) -> None:
    surface.pipeline.deltas = answer("a", finish=finish, stop=stop)
    whole = (await surface.post(PATH, **ASK, stop_sequences=["###"])).json()
    assert (whole["stop_reason"], whole.get("stop_sequence")) == told
    delta = events((await surface.post(PATH, **ASK, stop_sequences=["###"], stream=True)).text)[-2].data["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == told


async def test_thinking_and_a_tool_call(parsing: Surface) -> None:
    parsing.pipeline.deltas = spoken(parsing.tokenizer, f"<think>hm</think>Wait.{CALL}")
    whole = (await parsing.post(PATH, **ASK, tools=[TOOL])).json()
    assert whole["stop_reason"] == "tool_use"
    thinking, text, call = whole["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "hm", "Wait.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    found = events((await parsing.post(PATH, **ASK, tools=[TOOL], stream=True)).text)
    starts = [one.data for one in found if one.kind == "content_block_start"]
    assert [(one["index"], one["content_block"]["type"]) for one in starts] == [
        (0, "thinking"), (1, "text"), (2, "tool_use"),
    ]  # fmt: skip
    assert [one.data["index"] for one in found if one.kind == "content_block_stop"] == [0, 1, 2]
    deltas = [one.data["delta"] for one in found if one.kind == "content_block_delta"]
    arguments = "".join(one["partial_json"] for one in deltas if one["type"] == "input_json_delta")
    assert json.loads(arguments) == {"city": "Oslo"}
    assert found[-2].data["delta"]["stop_reason"] == "tool_use" and found[-1].kind == "message_stop"


async def test_a_conversation_with_tools_and_pictures_is_understood(parsing: Surface) -> None:
    parsing.pipeline.deltas = answer("a")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "rain"}, PICTURE]}
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "what?"}, PICTURE]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    found = await parsing.post(PATH, **{**ASK, "messages": conversation}, tools=[TOOL])
    assert found.status_code == 200, found.text
    (job,) = parsing.pipeline.jobs
    assert [ref.param for ref in job.prompt.media] == [
        "messages[0].content[1].source",
        "messages[2].content[0].content[1].source",
    ]
    assert parsing.tokenizer.decode(job.prompt.token_ids).count("<|image_pad|>") == 2


async def test_tokens_are_counted(surface: Surface) -> None:
    found = await surface.post(f"{PATH}/count_tokens", model="tiny", messages=ASK["messages"], system="be brief")
    surface.pipeline.deltas = answer("a")
    await surface.post(PATH, **ASK, system="be brief")
    (job,) = surface.pipeline.jobs
    count = len(job.prompt.token_ids)
    assert found.json() == {"input_tokens": count, "context_management": {"original_input_tokens": count}}


async def test_what_a_picture_takes_is_asked_of_a_worker(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", **KNOWN, media_tokens={"image": 12})
    conversation = [{"role": "user", "content": [PICTURE]}]
    found = await surface.post(f"{PATH}/count_tokens", model="tiny", messages=conversation)
    assert found.json()["input_tokens"] == 33
    (job,) = surface.pipeline.jobs
    assert job.params["max_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_any_token_has_its_status(surface: Surface, stream: bool) -> None:
    surface.pipeline.error = NoWorker("no worker for: decode")
    found = await surface.post(PATH, **ASK, stream=stream)
    assert found.status_code == 503
    assert found.json() == {"type": "error", "error": {"type": "overloaded_error", "message": "no worker for: decode"}}


async def test_an_error_in_the_middle(surface: Surface, caplog: pytest.LogCaptureFixture) -> None:
    surface.pipeline.deltas = answer("a", finish=None)
    surface.pipeline.error = WorkerLost("the worker died")
    found = events((await surface.post(PATH, **ASK, stream=True)).text)
    assert kinds(found)[-2:] == ["content_block_delta", "error"]
    assert found[-1].data["error"] == {"type": "overloaded_error", "message": "the worker died"}
    assert not [one for one in caplog.records if one.exc_info], "a fault of a worker is none of this process"


URL = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"messages": None}, 400, "messages"),
        ({"model": "other"}, 404, "tiny"),
        ({"messages": [{"role": "user", "content": [URL]}]}, 400, "404"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, 400, "not supported"),
        ({"messages": [{"role": "assistant", "content": [PICTURE]}]}, 400, "user"),
        ({"system": [PICTURE]}, 400, "text"),
        ({"tools": [TOOL]}, 400, "--tool-call-parser"),
    ],
)
async def test_what_is_refused(surface: Surface, change: dict[str, Any], status: int, says: str) -> None:
    found = await surface.post(PATH, **{**ASK, **change})
    assert found.status_code == status, found.text
    assert found.json()["type"] == "error" and says in found.json()["error"]["message"]
    assert found.json()["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert surface.pipeline.jobs == []
