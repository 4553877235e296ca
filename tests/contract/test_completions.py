"""POST /v1/completions over vLLM's serving layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from api import context
from api.context import RequestContext
from app.errors.serving import NoWorker, WorkerLost
from app.messages.deltas import Delta, TokenLogprob
from tests.contract.serving import Surface, answer, chunks, spoken, step

PATH = "/v1/completions"
USAGE = {"stream_options": {"include_usage": True}}
KNOWN: dict[str, Any] = {"prompt_token_ids": [1] * 33, "cached_tokens": 16}


def texts(found: list[Any]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for chunk in found:
        for choice in chunk["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


async def test_a_whole_answer(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a", " b", **KNOWN)
    found = (await surface.post(PATH, model="tiny", prompt="hi there", max_tokens=None, seed=3)).json()
    assert (found["id"], found["object"], found["model"]) == ("cmpl-mine", "text_completion", "tiny")
    (choice,) = found["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "a b", "stop")
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (33, 2, 35)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    (job,) = surface.pipeline.jobs
    assert job.prompt.token_ids == surface.tokenizer.encode("hi there")
    assert (job.params["max_tokens"], job.params["seed"]) == (16, 3)  # null is the default, which is 16 here


async def test_a_stream(surface: Surface) -> None:
    surface.pipeline.deltas = spoken(surface.tokenizer, "a 👩‍🚀\x00 data: [DONE]\n\n b", **KNOWN)
    found = chunks((await surface.post(PATH, prompt="hi", stream=True, service_tier="auto", **USAGE)).text)
    assert texts(found) == {0: "a 👩‍🚀\x00 data: [DONE]\n\n b"}
    assert [c["finish_reason"] for one in found for c in one["choices"] if c["finish_reason"]] == ["stop"]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == len(surface.pipeline.deltas)
    assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert {one["service_tier"] for one in found} == {"default"}


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [5, 6, 7], [[5, 6, 7]]])
async def test_each_form_of_a_prompt(surface: Surface, prompt: Any) -> None:
    surface.pipeline.deltas = answer("a")
    found = await surface.post(PATH, prompt=prompt)
    assert found.status_code == 200, found.text
    expected = surface.tokenizer.encode("hi") if "hi" in prompt else [5, 6, 7]
    assert [job.prompt.token_ids for job in surface.pipeline.jobs] == [expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["hi", "you there"], [[5, 6], [7]]])
async def test_several_prompts_and_choices(surface: Surface, prompts: list[Any], stream: bool) -> None:
    surface.pipeline.deltas = answer("a", " b", **KNOWN)
    found = await surface.post(PATH, prompt=prompts, n=2, best_of=2, stream=stream, **(USAGE if stream else {}))
    if stream:
        parts = chunks(found.text)
        assert texts(parts) == dict.fromkeys(range(4), "a b")
        ends = [c["index"] for one in parts for c in one["choices"] if c["finish_reason"]]
        assert sorted(ends) == [0, 1, 2, 3]
        assert sum(not one["choices"] for one in parts) == 1
        usage = parts[-1]["usage"]
    else:
        assert [(one["index"], one["text"]) for one in found.json()["choices"]] == [(at, "a b") for at in range(4)]
        usage = found.json()["usage"]
    # Each prompt is counted once, and what it found in the cache too.
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (66, 8)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


async def test_the_most_choices(surface: Surface) -> None:
    surface.pipeline.deltas = answer("a")
    found = await surface.post(PATH, prompt=[5, 6, 7], n=128)
    assert len(found.json()["choices"]) == 128
    found = await surface.post(PATH, prompt=["hi", "you"], n=64)
    assert len(found.json()["choices"]) == 128


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("apart", [False, True])
async def test_echo_with_logprobs(surface: Surface, stream: bool, apart: bool) -> None:
    """`apart`: what is said of the prompt comes from the prefill worker, before the decode worker's first token."""

    def tops(token: int, text: str) -> list[TokenLogprob]:
        return [TokenLogprob(token, -0.5, 1, text)]

    first = step(0, "", [], prompt_logprobs=[None, tops(71, "h"), tops(72, "i")])
    last = step(1, "c", [9], logprobs=[tops(9, "c")], finish_reason="length")
    surface.pipeline.deltas = [[first], [last]]
    if not apart:
        last.prompt_logprobs = first.prompt_logprobs
        surface.pipeline.deltas = [[last]]
    prompt = surface.tokenizer.encode("hhi")
    ask = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    found = await surface.post(PATH, **ask)
    choice = (chunks(found.text)[0] if stream else found.json())["choices"][0]
    assert choice["text"] == "hhic"
    assert choice["logprobs"]["tokens"][1:] == ["h", "i", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert surface.pipeline.jobs[0].params["prompt_logprobs"] == 1


async def test_a_prompt_that_is_only_scored(surface: Surface) -> None:
    surface.pipeline.deltas = answer("c", finish="length")
    found = (await surface.post(PATH, prompt="hi", echo=True, max_tokens=0)).json()
    assert found["choices"][0]["text"] == "hi"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hi", ["hi", "you"]])
async def test_an_error_before_any_token_has_its_status(surface: Surface, prompt: Any, stream: bool) -> None:
    surface.pipeline.error = NoWorker("no worker for: decode")
    found = await surface.post(PATH, prompt=prompt, stream=stream)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "no_worker")
    assert found.headers["retry-after"] == "5"


@pytest.mark.parametrize("prompt", ["hi", ["hi", "you"]])
async def test_an_error_in_the_middle(surface: Surface, prompt: Any) -> None:
    surface.pipeline.deltas = answer("a", finish=None)
    surface.pipeline.error = WorkerLost("the worker died")
    found = chunks((await surface.post(PATH, prompt=prompt, stream=True)).text)
    assert found[-1]["error"]["code"] == "worker_lost" and "choices" in found[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, None),
        ({"prompt": [[]]}, None),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": "x", "n": "many"}, "n"),
        ({"prompt": "x", "n": 129}, "n"),
        ({"prompt": "x", "n": "129"}, "n"),
        ({"prompt": ["x", "y"], "n": 65}, "n"),
        ({"prompt": [[5], [6]], "n": 65}, "n"),
        ({"prompt": "x", "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x" * 9000}, "input_tokens"),
    ],
)
async def test_what_is_refused(surface: Surface, body: dict[str, Any], param: str | None) -> None:
    found = await surface.post(PATH, **body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
    assert surface.pipeline.jobs == []


async def test_another_model(surface: Surface) -> None:
    found = await surface.post(PATH, model="other", prompt="x")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("ask", [{"prompt": ["hi", "you"], "n": 2}, {"prompt": "hi"}])
async def test_a_client_that_leaves_stops_every_choice(surface: Surface, ask: dict[str, Any]) -> None:
    running: list[str] = []

    async def endless(job: Any) -> AsyncGenerator[list[Delta], None]:
        running.append(job.request_id)
        try:
            yield [step(0, "a", [5])]
            await asyncio.Event().wait()
        finally:
            running.remove(job.request_id)

    surface.pipeline.stream = endless
    asked = RequestContext("test", 2e9)
    context.enter(asked)
    frames = await surface.serving.completion(surface.serving.completion_request({**ask, "stream": True}, "test"))
    for _ in range(ask.get("n", 1) * (1 if ask["prompt"] == "hi" else 2)):
        await anext(frames)
    assert len(running) == (4 if "n" in ask else 1)
    await frames.aclose()
    await asyncio.wait_for(asked.close(), 5)
    assert running == []
    del surface.pipeline.stream
