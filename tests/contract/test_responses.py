"""POST /v1/responses over vLLM's serving layer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors.serving import NoWorker, WorkerLost
from tests.contract.serving import Event, Surface, answer, events, spoken
from tests.pictures import data_url, encoded

PATH = "/v1/responses"
KNOWN: dict[str, Any] = {"prompt_token_ids": [1] * 33, "cached_tokens": 16, "media_tokens": {"image": 12}}
REFUSAL = {"type": "refusal", "refusal": "I will not"}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def numbered(found: list[Event]) -> list[str]:
    """The events' kinds. Each must say its kind itself, and count on."""
    assert [one.data["sequence_number"] for one in found] == list(range(len(found)))
    assert [one.data["type"] for one in found] == [one.kind for one in found]
    return [one.kind.removeprefix("response.") for one in found]


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": list(parts)}


def usage_of(response: dict[str, Any]) -> tuple[int, int, int, int, Any]:
    usage = response["usage"]
    details = usage["input_tokens_details"]
    counted = (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])
    return (*counted, details["cached_tokens"], details["multimodal_tokens"])


async def test_a_whole_answer(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", " b", **KNOWN)
    ask = {"input": "hi", "store": True, "metadata": {"a": "b"}, "user": None, "service_tier": None, "of_tomorrow": 1}
    found = (await surface.post(PATH, model="tiny", max_output_tokens=9, **ask)).json()
    assert (found["id"], found["object"], found["status"]) == ("resp_mine", "response", "completed")
    (item,) = found["output"]
    assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "assistant", "a b")
    assert found["metadata"] == {"a": "b"}
    assert usage_of(found) == (33, 2, 35, 16, {"image": 12})
    assert surface.pipeline.jobs[0].params["max_tokens"] == 9


async def test_a_stream(surface: Surface) -> None:
    surface.pipeline.deltas = spoken(surface.tokenizer, "a 👩‍🚀\x00 data: [DONE]\n\n b", **KNOWN)
    found = events((await surface.post(PATH, input="hi", stream=True)).text)
    kinds = numbered(found)
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(one.data["delta"] for one in found if one.kind == "response.output_text.delta")
    assert text == "a 👩‍🚀\x00 data: [DONE]\n\n b"
    last = found[-1].data["response"]
    assert last["output"][0]["content"][0]["text"] == text
    assert usage_of(last)[1:] == (len(surface.pipeline.deltas), 33 + len(surface.pipeline.deltas), 16, {"image": 12})


async def test_a_stream_and_a_whole_answer_that_are_cut_short(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", finish="length")
    assert (await surface.post(PATH, input="hi")).json()["status"] == "incomplete"
    last = events((await surface.post(PATH, input="hi", stream=True)).text)[-1]
    assert last.data["response"]["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_and_a_tool_call(parsing: Surface, stream: bool) -> None:
    parsing.pipeline.deltas = spoken(parsing.tokenizer, f"<think>hm</think>Wait.{CALL}", **KNOWN)
    found = await parsing.post(PATH, input="hi", tools=[TOOL], stream=stream)
    response = events(found.text)[-1].data["response"] if stream else found.json()
    reasoning, message, call = response["output"]
    assert [one["type"] for one in response["output"]] == ["reasoning", "message", "function_call"]
    assert reasoning["content"][0]["text"] == "hm" and message["content"][0]["text"] == "Wait."
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    if stream:
        kinds = numbered(events(found.text))
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
        assert "reasoning_text.delta" in kinds and "function_call_arguments.done" in kinds
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_conversation_with_tools_and_pictures_is_understood(parsing: Surface) -> None:
    parsing.pipeline.deltas = answer("a")
    picture = {"type": "input_image", "image_url": data_url(encoded()), "detail": "auto"}
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "what?"}, picture]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "it rains", "annotations": []}]},
        {"role": "user", "content": "and now?"},
    ]  # fmt: skip
    found = await parsing.post(PATH, input=conversation, tools=[TOOL])
    assert found.status_code == 200, found.text
    (job,) = parsing.pipeline.jobs
    assert [ref.param for ref in job.prompt.media] == ["input[1].content[1].image_url"]
    prompt = parsing.tokenizer.decode(job.prompt.token_ids)
    assert prompt.count("<|image_pad|>") == 1 and "it rains" in prompt and "and now?" in prompt


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (said(REFUSAL), "I will not"),
        (said({"type": "output_text", "text": "Hm. ", "annotations": []}, REFUSAL), "Hm. I will not"),
        ({"role": "assistant", "content": [REFUSAL]}, "I will not"),
    ],
)
async def test_what_the_model_refused_is_part_of_the_talk(surface: Surface, item: Any, expected: str) -> None:
    surface.pipeline.deltas = answer("a")
    question = {"role": "user", "content": "why?"}
    found = await surface.post(PATH, input=[question, item, question])
    assert found.status_code == 200, found.text
    assert expected in surface.tokenizer.decode(surface.pipeline.jobs[0].prompt.token_ids)


@pytest.mark.parametrize("parts", [[{"type": "refusal"}], [{"type": "output_text"}], ["text"], [5]])
async def test_parts_without_text_are_no_servers_error(surface: Surface, parts: list[Any]) -> None:
    for item in (said(*parts), {"role": "assistant", "content": parts}):
        found = await surface.post(PATH, input=[item])
        assert found.status_code == 400, found.text


@pytest.mark.parametrize(("given", "streams"), [("false", False), ("true", True), (0, False), ("no", False)])
async def test_a_stream_is_what_vllm_reads_as_one(surface: Surface, given: Any, streams: bool) -> None:
    surface.pipeline.deltas = answer("a")
    found = await surface.post(PATH, input="hi", stream=given)
    assert found.status_code == 200, found.text
    assert found.headers["content-type"].startswith("text/event-stream" if streams else "application/json")


async def test_structured_text_reaches_the_worker(surface: Surface) -> None:
    surface.pipeline.deltas = answer("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "name": "it", "schema": schema}}
    assert (await surface.post(PATH, input="hi", text=form)).status_code == 200
    assert surface.pipeline.jobs[0].params["structured_outputs"]["json"] == schema


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_any_token_has_its_status(surface: Surface, stream: bool) -> None:
    surface.pipeline.error = NoWorker("no worker for: decode")
    found = await surface.post(PATH, input="hi", stream=stream)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "no_worker")


async def test_an_error_in_the_middle(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", finish=None)
    surface.pipeline.error = WorkerLost("the worker died")
    found = events((await surface.post(PATH, input="hi", stream=True)).text)
    assert numbered(found)[-2:] == ["error", "failed"]
    assert (found[-2].data["code"], found[-2].data["message"]) == ("worker_lost", "the worker died")
    response = found[-1].data["response"]
    assert (response["id"], response["status"]) == ("resp_mine", "failed")
    assert response["error"] == {"code": "server_error", "message": "the worker died"}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": "x", "background": True}, 400, "background"),
        ({"input": "x", "previous_response_id": "resp_1"}, 404, "previous_response_id"),
        ({"input": "x", "prompt": {"id": "p"}}, 400, "prompt"),
        ({"input": "x", "max_output_tokens": "many"}, 400, "max_output_tokens"),
        ({"input": "x", "model": "other"}, 404, "model"),
        ({"input": [{"role": "user", "content": "x"}, said()]}, 400, "input[1].content"),
        ({"input": [{"role": "assistant", "content": []}]}, 400, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
    ],
)
async def test_what_is_refused(surface: Surface, body: dict[str, Any], status: int, param: str) -> None:
    found = await surface.post(PATH, **body)
    assert (found.status_code, found.json()["error"]["param"]) == (status, param), found.text


async def test_nothing_is_stored(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a")
    made = (await surface.post(PATH, input="hi", store=True)).json()["id"]
    for found in (
        await surface.http.get(f"{PATH}/{made}"),
        await surface.http.delete(f"{PATH}/{made}"),
        await surface.http.post(f"{PATH}/{made}/cancel"),
    ):
        assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
    assert surface.serving._responses.response_store == surface.serving._responses.msg_store == {}


def test_no_environment_makes_vllm_keep_responses(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    from api.vllm_responses import Responses

    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    assert envs.VLLM_ENABLE_RESPONSES_API_STORE
    common = {"online_renderer": serving._responses.online_renderer, "request_logger": None}
    made = Responses(serving.client, serving.models, chat_template=None, chat_template_content_format="auto", **common)
    assert not made.enable_store
