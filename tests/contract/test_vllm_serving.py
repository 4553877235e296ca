"""The API's adapters to vLLM: what they use is there, and behaves as they take it to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from api import context
from api.context import RequestContext
from app.errors.requests import InvalidRequest
from app.errors.serving import NoWorker
from app.messages.deltas import TokenLogprob
from tests.contract.serving import frames, step

CACHED: dict[str, Any] = {"cached_tokens": 16, "created_cache_tokens": 8}
ANSWER = [
    [step(0, "", [5], prompt_token_ids=[1] * 33, media_tokens={"image": 12}, **CACHED)],
    [step(1, ' "quoted"\n', [6]), step(2, " ünï ☃", [7])],
    [step(3, "", [8])],
    [step(4, " end", [9], finish_reason="stop", stop_reason="###")],
]


def anonymous(frame: str) -> str:
    return re.sub(r'"created":\d+', '"created":0', frame)


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
@pytest.mark.parametrize("finish", [("stop", "###"), ("stop", None), ("stop", 42), ("length", None)])
async def test_fast_lane_writes_what_vllm_writes(
    serving: Any, pipeline: Any, monkeypatch: pytest.MonkeyPatch, options: Any, finish: tuple[str, Any]
) -> None:
    from api import fast_lane

    last = step(4, " end", [9], finish_reason=finish[0], stop_reason=finish[1])
    pipeline.deltas = [*ANSWER[:-1], [last]]
    taken: list[bool] = []
    takes = fast_lane.takes

    def noted(request: Any, *, parsers: bool) -> bool:
        taken.append(takes(request, parsers=parsers))
        return taken[-1]

    monkeypatch.setattr(fast_lane, "takes", noted)
    fast = await frames(serving, stream=True, stream_options=options)
    monkeypatch.setattr(fast_lane, "takes", lambda *_, **__: False)
    slow = await frames(serving, stream=True, stream_options=options)
    assert taken == [True]
    assert anonymous("".join(fast)) == anonymous("".join(slow))
    # The role goes with the first token, and no token waits for a later one.
    assert [one.count("data: ") for one in fast[:-1]] == [2, 1, 1]


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": True},
        {"n": 2, "temperature": 1.0},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
async def test_what_is_not_plain_takes_vllms_lane(serving: Any, body: dict[str, Any]) -> None:
    from api import fast_lane

    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    assert fast_lane.takes(serving.chat_request(ask, "t"), parsers=False)
    assert not fast_lane.takes(serving.chat_request({**ask, **body}, "t"), parsers=False)
    assert not fast_lane.takes(serving.chat_request(ask, "t"), parsers=True)


async def test_whole_answer_counts_what_the_worker_counted(serving: Any, pipeline: Any) -> None:
    counted = {"prompt_token_ids": [1] * 33, "media_tokens": {"image": 12}, **CACHED}
    pipeline.deltas = [[step(0, "all of it", [1, 2, 3], finish_reason="stop", **counted)]]
    context.enter(RequestContext("test", 2e9))
    request = serving.chat_request({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, "test")
    answer = json.loads((await serving.chat(request)).model_dump_json())
    assert answer["choices"][0]["message"]["content"] == "all of it"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (33, 3)
    assert {name: usage["prompt_tokens_details"][name] for name in CACHED} == CACHED
    assert usage["prompt_tokens_details"]["multimodal_tokens"] == {"image": 12}


async def test_logprobs_arrive(serving: Any, pipeline: Any) -> None:
    candidates = [TokenLogprob(5, -0.5, 1, "a"), TokenLogprob(6, -1.5, 2, "b")]
    pipeline.deltas = [[step(0, "a", [5], logprobs=[candidates], finish_reason="length")]]
    found = await frames(serving, stream=True, logprobs=True, top_logprobs=2)
    content = json.loads(found[1].removeprefix("data: "))["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in content[0]["top_logprobs"]] == [("a", -0.5), ("b", -1.5)]


async def test_errors_of_the_pipeline_come_through(serving: Any, pipeline: Any) -> None:
    pipeline.error = NoWorker("no worker for: decode")
    with pytest.raises(NoWorker):
        await frames(serving, stream=True)
    asked = RequestContext("test", 2e9)
    context.enter(asked)
    request = serving.chat_request({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, "test")
    with pytest.raises(Exception, match="no worker"):
        await serving.chat(request)
    assert asked.failure is not None and asked.failure.code == "no_worker"


@pytest.mark.parametrize(
    "field", [{"top_logprobs": 3}, {"tool_choice": "required"}, {"stream_options": {"include_usage": True}}]
)
def test_what_vllms_request_model_refuses_is_the_clients_fault(serving: Any, field: dict[str, Any]) -> None:
    with pytest.raises((InvalidRequest, ValidationError)):
        serving.chat_request({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **field}, "t")


def test_sampling_parameters_survive_json(vllm: Any) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from workers.engine import _params

    params = SamplingParams(
        n=1, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, seed=3, stop=["a", "b"], stop_token_ids=[7], max_tokens=9,
        min_tokens=2, logprobs=2, logit_bias={3: 1.5}, bad_words=["x"], presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.1, ignore_eos=True, output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}), extra_args={"k": [1]},
    )  # fmt: skip
    there = json.loads(json.dumps(msgspec.to_builtins(params, str_keys=True)))
    assert _params(there) == params


def test_every_method_of_vllms_client_is_there(vllm: Any) -> None:
    from vllm.engine.protocol import EngineClient

    from api.vllm_client import PipelineClient

    assert not PipelineClient.__abstractmethods__
    assert issubclass(PipelineClient, EngineClient)


def test_nixl_agents_get_a_progress_delay(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's binding still takes the delay from where the adapter puts it."""
    from nixl import _api

    from app.tensors import nixl_progress

    made: list[Any] = []
    monkeypatch.setattr(_api.nixlBind, "nixlAgent", lambda name, config: made.append(config))
    monkeypatch.setenv(nixl_progress.VARIABLE, "250")
    nixl_progress.install()
    config = _api.nixlBind.nixlAgentConfig()
    config.pthrDelay = 0
    _api.nixlBind.nixlAgent("name", config)
    assert made[0].pthrDelay == 250
    source = Path(_api.__file__).read_text()
    assert "nixlBind.nixlAgent(agent_name, agent_config)" in source and "agent_config.pthrDelay = 0" in source


def test_the_plugins_are_announced() -> None:
    """vLLM loads them in its own processes by these names."""
    from importlib.metadata import entry_points

    general = {entry.value for entry in entry_points(group="vllm.general_plugins")}
    wanted = {"app.tensors.nixl_progress:install", "workers.cpu_amx:install", "workers.cpu_lora:install"}
    assert general >= wanted
    assert {e.value for e in entry_points(group="vllm.platform_plugins")} >= {"app.torchvision_ops:define"}


def test_amx_is_asked_for(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch still has both functions, and asking is left to processors that have AMX."""
    import torch

    from workers import cpu_amx

    asked: list[bool] = []
    assert callable(torch.cpu._init_amx) and isinstance(torch.cpu._is_amx_tile_supported(), bool)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    for supported in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda supported=supported: supported)
        cpu_amx.install()
    assert asked == [True]
