"""Adapters and vLLM: how its serving code comes to know one, and what its engine is told."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from api.adapters import Adapters
from api.context import NamedAdapter, RequestContext
from app.adapter_registry import AdapterRegistry, Published, lora_number
from app.adapters import Adapter, AdapterRefused
from app.errors.adapters import AdapterMissing
from app.errors.serving import WorkerLost
from app.fleet import FleetView
from app.redis import connect
from app.registry import Registry
from app.roles import Role
from app.settings import Settings, SettingsError
from tests.contract.serving import Surface, answer, chunks, spoken
from tests.redis_server import free_port
from workers.loras import EngineLoras, Limits

SQL = Adapter(name="sql", version="v1", path="/adapters/v1", rank=8, size=1000)
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
CALLS = '<think>hm hm</think>Wait.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class OneAdapter:
    """Only `sql` is published."""

    async def enter(self, asked: RequestContext, model: Any) -> None:
        if model == "sql":
            asked.adapter = NamedAdapter("sql", SQL.id)

    async def published(self) -> list[Published]:
        return [Published(name="sql", version="v1", uri="s3://a/b", rank=8, size=1000, load="l", at=1.0)]


@pytest.fixture
def adapted(surface: Surface) -> Surface:
    surface.services.adapters = OneAdapter()
    surface.pipeline.deltas = answer("Yes", " it is")
    return surface


@pytest.fixture
def adapted_parsing(parsing: Surface) -> Surface:
    """Of a model that calls tools and reasons."""
    parsing.services.adapters = OneAdapter()
    parsing.pipeline.deltas = spoken(parsing.tokenizer, CALLS)
    return parsing


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ],
)
async def test_a_request_runs_with_the_adapter_that_it_names(adapted: Surface, path: str, body: dict[str, Any]) -> None:
    found = await adapted.post(path, model="sql", **body)
    assert (found.status_code, found.json()["model"]) == (200, "sql"), found.text
    found = await adapted.post(path, model="tiny", **body)
    assert (found.status_code, found.json()["model"]) == (200, "tiny"), found.text
    assert [job.adapter for job in adapted.pipeline.jobs] == [SQL.id, ""]
    unknown = await adapted.post(path, model="nosql", **body)
    assert unknown.status_code == 404 and "does not exist" in unknown.text


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}], ids=["fast lane", "vLLM's"])
async def test_a_stream_goes_by_the_adapters_name(adapted: Surface, more: dict[str, Any]) -> None:
    found = chunks((await adapted.chat(model="sql", stream=True, **more)).text)
    assert {one["model"] for one in found} == {"sql"}
    assert [job.adapter for job in adapted.pipeline.jobs] == [SQL.id]


async def test_every_choice_and_prompt_runs_with_it(adapted: Surface) -> None:
    await adapted.post("/v1/completions", model="sql", prompt=["a", "b"], n=2)
    assert [job.adapter for job in adapted.pipeline.jobs] == [SQL.id] * 4


async def test_its_answers_are_read_as_the_models(adapted_parsing: Surface) -> None:
    """Tool calls, and the reasoning before them."""
    base, adapter = [(await adapted_parsing.chat(model=one, tools=TOOLS)).json()["choices"] for one in ("tiny", "sql")]
    (call,) = adapter[0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Oslo"})
    assert (adapter[0]["message"]["reasoning"], adapter[0]["message"]["content"]) == ("hm hm", "Wait.")
    assert _without_ids(base) == _without_ids(adapter)
    assert [job.adapter for job in adapted_parsing.pipeline.jobs] == ["", SQL.id]


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}], ids=["reasoning", "tools"])
async def test_its_streams_are_read_as_the_models(adapted_parsing: Surface, tools: dict[str, Any]) -> None:
    base, adapter = [
        chunks((await adapted_parsing.chat(model=one, stream=True, **tools)).text) for one in ("tiny", "sql")
    ]
    assert ({one["model"] for one in base}, {one["model"] for one in adapter}) == ({"tiny"}, {"sql"})
    told = [[_without_ids(one["choices"]) for one in found] for found in (base, adapter)]
    assert told[0] == told[1]
    deltas = [one["choices"][0]["delta"] for one in adapter]
    assert "".join(one.get("reasoning") or "" for one in deltas) == "hm hm"
    assert any(one.get("tool_calls") for one in deltas) is bool(tools)
    assert [job.adapter for job in adapted_parsing.pipeline.jobs] == ["", SQL.id]


def _without_ids(choices: list[Any]) -> list[Any]:
    """Calls have ids of their own in each answer."""
    for one in choices:
        for call in (one.get("message") or one["delta"]).get("tool_calls") or ():
            call.pop("id", None)
    return choices


@pytest.mark.parametrize(
    "ask",
    [
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"response_format": FORM},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
    ids=["required", "named", "schema", "json", "choice"],
)
async def test_its_answers_are_held_to_the_same_form(adapted_parsing: Surface, ask: dict[str, Any]) -> None:
    """And its grammar begins where the reasoning ends, as the model's does."""
    for model in ("tiny", "sql"):
        found = await adapted_parsing.chat(model=model, **ask)
        assert found.status_code == 200, found.text
    base, adapter = adapted_parsing.pipeline.jobs
    assert (base.adapter, adapter.adapter) == ("", SQL.id)
    assert adapter.params["structured_outputs"] and adapter.params == base.params
    assert adapter.reasoning_ended is False and adapter.reasoning_ended == base.reasoning_ended
    assert adapter.reasoning_parser_kwargs == base.reasoning_parser_kwargs


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_its_tool_calls_in_the_other_apis(adapted_parsing: Surface, path: str) -> None:
    if path == "/v1/responses":
        body: dict[str, Any] = {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
    else:
        tool = {"name": "weather", "input_schema": SCHEMA}
        body = {"messages": MESSAGES, "max_tokens": 100, "tools": [tool]}
    base, adapter = [(await adapted_parsing.post(path, model=one, **body)).json() for one in ("tiny", "sql")]
    kinds = [[one["type"] for one in found.get("output") or found["content"]] for found in (base, adapter)]
    assert kinds[0] == kinds[1] and {"function_call", "tool_use"} & set(kinds[1]), kinds
    assert {"reasoning", "thinking"} & set(kinds[1]), kinds
    assert [job.adapter for job in adapted_parsing.pipeline.jobs] == ["", SQL.id]


async def test_its_tokens_are_the_models(adapted: Surface) -> None:
    found = await adapted.post("/tokenize", model="sql", prompt="hi there")
    assert found.json()["tokens"] == adapted.tokenizer.encode("hi there")
    assert (await adapted.post("/tokenize", model="nosql", prompt="hi")).status_code == 404


async def test_models_have_it_with_its_parent(adapted: Surface) -> None:
    found = (await adapted.http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["parent"], one["root"] == SQL.id) for one in found] == [
        ("tiny", None, False),
        ("sql", "tiny", True),
    ]
    assert (await adapted.http.get("/v1/models/sql")).json()["parent"] == "tiny"


async def test_the_model_is_listed_while_redis_is_away(surface: Surface, caplog: pytest.LogCaptureFixture) -> None:
    nobody = connect(f"redis://127.0.0.1:{free_port()}/0", 1.0, name="test")
    registry = AdapterRegistry(nobody, "tiny")
    fleet = FleetView(Registry(nobody, 1.0), "tiny", lambda _gone: None)
    surface.services.adapters = Adapters(registry, fleet, surface.services.settings)
    found = await surface.http.get("/v1/models")
    assert (found.status_code, [one["id"] for one in found.json()["data"]]) == (200, ["tiny"])
    assert "without its adapters" in caplog.text
    assert (await surface.http.get("/v1/models/tiny")).json()["id"] == "tiny"
    unknown = await surface.http.get("/v1/models/sql")  # nobody can say that it does not exist
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "broker_unavailable")
    await nobody.aclose()


class Llm:
    """What EngineLoras asks of an AsyncLLM."""

    def __init__(self, fault: Exception | None = None, **config: Any) -> None:
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(**config) if config else None)
        self.fault = fault
        self.held: dict[int, Any] = {}

    async def add_lora(self, lora_request: Any) -> bool:
        self.held[lora_request.lora_int_id] = lora_request
        if self.fault is not None:
            raise self.fault
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return self.held.pop(lora_id, None) is not None

    async def list_loras(self) -> set[int]:
        return set(self.held)


def test_the_engine_has_what_is_asked_of_it(vllm: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    for name in ("add_lora", "remove_lora", "list_loras"):
        real, ours = inspect.signature(getattr(AsyncLLM, name)), inspect.signature(getattr(Llm, name))
        assert list(real.parameters) == list(ours.parameters), name
    assert "lora_request" in inspect.signature(AsyncLLM.generate).parameters


def test_the_largest_number_fits_what_vllms_runner_on_gpus_keeps(vllm: Any) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu.lora_utils import LoraState

    state, largest = LoraState(2), (1 << 31) - 1
    state.add_request("r", 1, LoRARequest("sql@v1", largest, "/adapters/v1"))
    (prompts, tokens, _) = state.make_lora_inputs(["r"], np.array([1]), np.array([3]))
    assert (prompts, tokens) == ((largest,), (largest,) * 3)
    with pytest.raises(OverflowError):
        state.add_request("r", 1, LoRARequest("sql@v1", largest + 1, "/adapters/v1"))


async def test_an_engine_is_told_of_an_adapter_by_name_and_version(vllm: Any) -> None:
    llm = Llm(max_lora_rank=8, max_loras=2, max_cpu_loras=4)
    loras = EngineLoras(llm)
    assert loras.limits == Limits(8, 2, 4)
    assert loras.request("") is None
    with pytest.raises(AdapterMissing):
        loras.request(SQL.id)
    await loras.add(SQL)
    request = loras.request(SQL.id)
    assert request is not None
    assert (request.lora_name, request.lora_path) == ("sql@v1", "/adapters/v1")
    assert request.lora_int_id == lora_number(SQL.id)
    with pytest.raises(AdapterRefused, match="same number"):
        await loras.add(SQL)
    await loras.remove(SQL.id)
    assert await loras.numbers() == set()
    with pytest.raises(AdapterMissing):
        loras.request(SQL.id)


async def test_what_an_engine_could_not_load_is_not_left_in_it(vllm: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    llm = Llm(
        Exception("Call to add_lora method failed: no such module"), max_lora_rank=8, max_loras=2, max_cpu_loras=4
    )
    loras = EngineLoras(llm)
    with pytest.raises(AdapterRefused, match="no such module"):
        await loras.add(SQL)
    assert llm.held == {}
    llm.fault = EngineDeadError()
    with pytest.raises(WorkerLost):
        await loras.add(SQL)
    assert EngineLoras(Llm()).limits is None


def test_vllms_flags_are_the_limits(vllm: Any, tiny: Any) -> None:
    from workers import engine_args

    flags = "--enable-lora --max-loras 2 --max-lora-rank 8 --max-cpu-loras 3"
    chosen = Settings(model=str(tiny), enable_multimodal=True, engine={"args": flags})  # type: ignore[arg-type]
    args = engine_args.build(chosen, None)
    assert (args.enable_lora, args.max_loras, args.max_lora_rank, args.max_cpu_loras) == (True, 2, 8, 3)
    encodes = chosen.model_copy(update={"worker": chosen.worker.model_copy(update={"roles": frozenset({Role.ENCODE})})})
    assert not engine_args.build(encodes, None).enable_lora
    for refused in ("--enable-tower-connector-lora", "--lora-target-modules q_proj"):
        engine = chosen.engine.model_copy(update={"args": f"{flags} {refused}"})
        with pytest.raises(SettingsError, match=refused.split()[0]):
            engine_args.build(chosen.model_copy(update={"engine": engine}), None)


def test_engines_that_would_mix_adapters_up_are_refused(vllm: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has read its plugins with its flags, and not this one where VLLM_PLUGINS leaves it out."""
    from vllm.lora.ops.torch_ops import lora_ops

    from workers import cpu_lora, engine_args

    chosen = Settings(model=str(tiny), engine={"args": "--enable-lora --max-lora-rank 8"})
    assert engine_args.build(chosen, None).enable_lora and cpu_lora.is_sound()
    monkeypatch.delattr(lora_ops.bgmv_shrink, "passes_over_none")
    with pytest.raises(SettingsError, match="trivet_cpu_lora"):
        engine_args.build(chosen, None)
    assert not engine_args.build(Settings(model=str(tiny)), None).enable_lora
