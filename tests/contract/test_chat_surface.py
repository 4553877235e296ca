"""POST /v1/chat/completions over vLLM's serving layer: what a client reads, chunk by chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors.serving import WorkerLost
from app.messages.deltas import TokenLogprob
from tests.contract.serving import Surface, answer, chunks, events, spoken, step

USAGE = {"stream_options": {"include_usage": True}}
KNOWN: dict[str, Any] = {"prompt_token_ids": [1] * 33, "cached_tokens": 16}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    for name in ("weather", "time")
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def choices(found: list[Any]) -> list[Any]:
    return [one["choices"][0] for one in found if one["choices"]]


def content(found: list[Any], index: int = 0) -> str:
    return "".join(one["delta"].get("content") or "" for one in choices(found) if one["index"] == index)


async def test_a_stream_of_text(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", " b", **KNOWN)
    found = chunks((await surface.chat(stream=True, **USAGE)).text)
    assert [one["delta"] for one in choices(found)] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": " b"},
    ]
    assert [one["finish_reason"] for one in choices(found)] == [None, None, "stop"]
    assert {(one["id"], one["object"], one["model"]) for one in found} == {
        ("chatcmpl-mine", "chat.completion.chunk", "tiny")
    }
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == {
        "prompt_tokens": 33, "completion_tokens": 2, "total_tokens": 35, "prompt_tokens_details": {"cached_tokens": 16},
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_two_choices(surface: Surface, stream: bool) -> None:
    surface.pipeline.deltas = answer("a", " b", **KNOWN)
    found = await surface.chat(n=2, seed=7, stream=stream, **(USAGE if stream else {}))
    assert [job.params["seed"] for job in surface.pipeline.jobs] == [7, 8]
    if stream:
        parts = chunks(found.text)
        for index in (0, 1):
            mine = [one for one in choices(parts) if one["index"] == index]
            assert [one["delta"].get("role") for one in mine] == ["assistant", None, None]
            assert [one["finish_reason"] for one in mine] == [None, None, "stop"]
        assert (content(parts, 0), content(parts, 1)) == ("a b", "a b")
        usage = parts[-1]["usage"]
    else:
        assert [(one["index"], one["message"]["content"]) for one in found.json()["choices"]] == [
            (0, "a b"),
            (1, "a b"),
        ]
        usage = found.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (33, 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16


AWKWARD = 'data: [DONE]\n\ndata: {"id": 1}\n\nevent: error\x00\x1b \u2028 👩‍🚀 ünï' + "x" * 100_000


@pytest.mark.parametrize("slow", [{}, {"logprobs": False, "return_token_ids": True}])
async def test_any_text_passes_through(surface: Surface, slow: dict[str, Any]) -> None:
    surface.pipeline.deltas = answer("before ", AWKWARD, " after")
    found = chunks((await surface.chat(stream=True, service_tier="flex", **slow)).text)
    assert content(found) == f"before {AWKWARD} after"
    assert {one["service_tier"] for one in found} == {"flex"}
    whole = (await surface.chat()).json()
    assert whole["choices"][0]["message"]["content"] == f"before {AWKWARD} after"


@pytest.mark.parametrize("slow", [{}, {"n": 2}])
async def test_a_character_of_several_tokens_comes_whole(surface: Surface, slow: dict[str, Any]) -> None:
    surface.pipeline.deltas = spoken(surface.tokenizer, "hm 👩‍🚀 ok")
    assert any(not one.text for (one,) in surface.pipeline.deltas), "no token ends inside a character"
    assert content(chunks((await surface.chat(stream=True, **slow)).text)) == "hm 👩‍🚀 ok"


async def test_a_stop_string_ends_it(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", "", "", stop="###")
    found = choices(chunks((await surface.chat(stream=True, stop=["###"])).text))
    assert (found[-1]["finish_reason"], found[-1]["stop_reason"]) == ("stop", "###")


@pytest.mark.parametrize("slow", [{}, {"n": 2}])
async def test_an_error_in_the_middle_ends_the_stream(surface: Surface, slow: dict[str, Any]) -> None:
    surface.pipeline.deltas = answer("a", " b", finish=None)
    surface.pipeline.error = WorkerLost("the worker died")
    found = chunks((await surface.chat(stream=True, **slow)).text)
    assert found[-1] == {
        "error": {"message": "the worker died", "type": "server_error", "param": None, "code": "worker_lost"}
    }
    assert content(found[:-1]) == "a b"
    assert all(one["finish_reason"] is None for one in choices(found[:-1]))


async def test_an_error_before_any_token_has_its_status(surface: Surface) -> None:
    surface.pipeline.error = WorkerLost("the worker died")
    for stream in (False, True):
        found = await surface.chat(stream=stream)
        assert (found.status_code, found.json()["error"]["code"]) == (503, "worker_lost")
        assert found.headers["retry-after"] == "1"


async def test_logprobs_in_both_forms(surface: Surface) -> None:
    tops = [[TokenLogprob(5, -0.5, 1, "a"), TokenLogprob(6, -1.5, 2, "b")]]
    surface.pipeline.deltas = [[step(0, "a", [5], logprobs=tops)], [step(1, "a", [5], logprobs=tops)]]
    surface.pipeline.deltas[-1][0].finish_reason = "length"
    ask = {"logprobs": True, "top_logprobs": 2}
    whole = (await surface.chat(**ask)).json()["choices"][0]["logprobs"]["content"]
    parts = choices(chunks((await surface.chat(stream=True, **ask)).text))[1:]
    assert [one for part in parts for one in part["logprobs"]["content"]] == whole
    assert [[(top["token"], top["logprob"]) for top in one["top_logprobs"]] for one in whole] == [
        [("a", -0.5), ("b", -1.5)]
    ] * 2


async def test_prompt_logprobs(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", prompt_logprobs=[None, [TokenLogprob(5, -0.5, 1, "a")]])
    assert (await surface.chat(prompt_logprobs=1)).json()["prompt_logprobs"] == [
        None,
        {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
    ]


async def test_null_is_the_default_and_what_is_unknown_is_ignored(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a")
    names = (
        "stream n stop seed logprobs top_logprobs tools tool_choice parallel_tool_calls response_format temperature "
        "max_tokens max_completion_tokens ignore_eos min_tokens skip_special_tokens echo stream_options user metadata "
        "service_tier frequency_penalty logit_bias kv_transfer_params vllm_xargs chat_template_kwargs model"
    )
    found = await surface.chat(**dict.fromkeys(names.split()))
    assert found.status_code == 200, found.text
    ask = {"user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True, "store": True, "of_tomorrow": {"x": [1]}}
    assert (await surface.chat(**ask, max_completion_tokens=3, max_tokens=9)).status_code == 200
    assert surface.pipeline.jobs[-1].params["max_tokens"] == 3


@pytest.mark.parametrize(("asked", "told"), [("auto", "default"), ("priority", "priority"), (None, None), ("?", None)])
async def test_the_tier_comes_back(surface: Surface, asked: str | None, told: str | None) -> None:
    surface.pipeline.deltas = answer("a")
    assert (await surface.chat(service_tier=asked)).json()["service_tier"] == told
    for more in ({}, {"n": 2}):
        found = chunks((await surface.chat(service_tier=asked, stream=True, **USAGE, **more)).text)
        assert {one.get("service_tier") for one in found} == {told}


@pytest.mark.parametrize(("ask", "param"), [({"n": 129}, "n"), ({"use_beam_search": True, "n": 2}, "use_beam_search")])
async def test_more_than_is_served_is_refused(surface: Surface, ask: dict[str, Any], param: str) -> None:
    found = await surface.chat(**ask)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
    assert surface.pipeline.jobs == []


async def test_tools_without_a_parser_are_refused(surface: Surface) -> None:
    found = await surface.chat(tools=TOOLS)
    assert found.status_code == 400 and "--tool-call-parser" in found.json()["error"]["message"]


async def test_tool_calls_as_a_whole(parsing: Surface) -> None:
    said = f"<think>hm</think>Wait.{call('weather', city='Oslo')}{call('time', city='Rome')}"
    parsing.pipeline.deltas = spoken(parsing.tokenizer, said, **KNOWN)
    (choice,) = (await parsing.chat(tools=TOOLS)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Wait.")
    calls = choice["message"]["tool_calls"]
    assert [(one["type"], one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls] == [
        ("function", "weather", {"city": "Oslo"}),
        ("function", "time", {"city": "Rome"}),
    ]
    (choice,) = (await parsing.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


async def test_streamed_tool_calls(parsing: Surface) -> None:
    said = f"<think>hm hm</think>Wait.{call('weather', city='Oslo')}{call('time', city='Rome')}"
    parsing.pipeline.deltas = spoken(parsing.tokenizer, said, **KNOWN)
    found = chunks((await parsing.chat(tools=TOOLS, stream=True, **USAGE)).text)
    deltas = [one["delta"] for one in choices(found)]
    assert "".join(one.get("reasoning") or "" for one in deltas) == "hm hm"
    assert content(found) == "Wait."
    calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
    for index, (name, city) in enumerate([("weather", "Oslo"), ("time", "Rome")]):
        first, *rest = [one for one in calls if one["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", name) and first["id"]
        assert all(one.keys() == {"index", "function"} and one["function"].keys() == {"arguments"} for one in rest)
        assert json.loads("".join(one["function"]["arguments"] for one in rest)) == {"city": city}
        assert len(rest) > 1, "arguments are held back"
    assert [one["finish_reason"] for one in choices(found) if one["finish_reason"]] == ["tool_calls"]
    details = found[-1]["usage"]
    assert details["completion_tokens"] == len(parsing.pipeline.deltas)
    assert details["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_must_be_is_held_to_its_form(parsing: Surface, choice: Any) -> None:
    parsing.pipeline.deltas = spoken(parsing.tokenizer, f"<think>hm</think>{call('weather', city='Oslo')}")
    found = (await parsing.chat(tools=TOOLS, tool_choice=choice)).json()["choices"][0]
    assert [one["function"]["name"] for one in found["message"]["tool_calls"]] == ["weather"]
    assert found["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    job = parsing.pipeline.jobs[-1]
    assert "weather" in job.params["structured_outputs"]["structural_tag"]
    # The worker's grammar begins where the reasoning ends, and it needs the template's arguments to know.
    assert job.reasoning_ended is False and "chat_template_kwargs" in job.reasoning_parser_kwargs


async def test_no_tool_may_be_called(parsing: Surface) -> None:
    said = call("weather", city="Oslo")
    parsing.pipeline.deltas = spoken(parsing.tokenizer, f"<think>hm</think>{said}")
    message = (await parsing.chat(tools=TOOLS, tool_choice="none")).json()["choices"][0]["message"]
    assert "tool_calls" not in message and message["content"] == said


async def test_a_call_that_is_cut_short(parsing: Surface) -> None:
    said = "<think>hm</think>" + call("weather", city="Oslo")[:-18]
    parsing.pipeline.deltas = spoken(parsing.tokenizer, said, finish="length")
    found = chunks((await parsing.chat(tools=TOOLS, stream=True)).text)
    assert [one["finish_reason"] for one in choices(found) if one["finish_reason"]] == ["length"]


async def test_structured_outputs_reach_the_worker(surface: Surface) -> None:
    surface.pipeline.deltas = answer("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    assert (await surface.chat(response_format=form)).status_code == 200
    assert surface.pipeline.jobs[-1].params["structured_outputs"]["json"] == schema


async def test_text_takes_the_fast_lane_beside_a_tool_parser(parsing: Surface, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool parser alone reads nothing where there are no tools; a reasoning parser always does."""
    chat = parsing.serving._chat
    request = parsing.serving.chat_request({"messages": [{"role": "user", "content": "hi"}]}, "t")
    assert chat._is_parsed(request)
    monkeypatch.setattr(chat.parser_cls, "reasoning_parser_cls", None)
    assert not chat._is_parsed(request)
    tools = parsing.serving.chat_request({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}, "t")
    assert chat._is_parsed(tools)
    parsing.pipeline.deltas = spoken(parsing.tokenizer, f"so: {call('weather')} and <tool_call>")
    fast = events((await parsing.chat(stream=True, **USAGE)).text)
    monkeypatch.setattr(chat, "_is_parsed", lambda _: True)
    slow = events((await parsing.chat(stream=True, **USAGE)).text)
    assert content([one.data for one in fast[:-1]]) == content([one.data for one in slow[:-1]])
    assert fast[-2].data["usage"]["completion_tokens"] == slow[-2].data["usage"]["completion_tokens"]


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params", "prompt_embeds"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
async def test_no_endpoint_takes_what_only_stages_may_say(
    surface: Surface, path: str, body: dict[str, Any], field: str
) -> None:
    for smuggled in ({field: {"do_remote_prefill": True}}, {"vllm_xargs": {field: "x"}}):
        found = await surface.post(path, **body, **smuggled)
        assert found.status_code == 400 and field in found.json()["error"]["message"]
    assert surface.pipeline.jobs == []
