"""Which of vLLM's parsers a model gets."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from app import tiny_model, vllm_reasoning
from app.settings import Settings, SettingsError
from app.settings_sections import ApiSettings

HERMES = """<tools></tools> {"name": <function-name>} <tool_call>\\n{\\"name\\": ...}\\n</tool_call>"""
CODER = "<tool_call>\\n<function=example>\\n</function>\\n</tool_call>"


def chosen(
    template: Any = None, model_type: str = "qwen3_vl", reasoning: str = "", more: Any = None, **api: Any
) -> Any:
    from api import vllm_parsers

    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)),
        structured_outputs_config=SimpleNamespace(reasoning_parser=reasoning),
    )
    tokenizer = SimpleNamespace(chat_template=template, **(more or {}))
    return vllm_parsers.chosen(ApiSettings(**api), config, tokenizer)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("given", "parser"),
    [
        ({}, None),
        ({"template": "no tools here"}, None),
        ({"template": HERMES}, "hermes"),
        ({"template": CODER}, "qwen3_coder"),
        ({"template": "<tool_call> of another kind </tool_call>"}, None),
        ({"template": HERMES, "tool_call_parser": "pythonic"}, "pythonic"),
        ({"model_type": "gpt_oss"}, "openai"),
        ({"template": HERMES, "more": {"response_template": {"fields": {"tool_calls": {}}}}}, "hf"),
        ({"more": {"response_template": {"fields": {"content": {}}}}}, None),
    ],
)
def test_the_model_says_how_it_writes_calls(given: dict[str, Any], parser: str | None) -> None:
    found = chosen(**given)
    assert (found["tool_parser"], found["enable_auto_tools"]) == (parser, parser is not None)


@pytest.mark.usefixtures("vllm")
def test_settings_decide() -> None:
    assert chosen(HERMES, enable_auto_tool_choice=False)["enable_auto_tools"] is False
    assert chosen(reasoning="qwen3")["reasoning_parser"] == "qwen3"
    with pytest.raises(SettingsError, match="api.tool_call_parser"):
        chosen(enable_auto_tool_choice=True)
    with pytest.raises(SettingsError, match=r"TRIVET_API__TOOL_CALL_PARSER.*'nix'.*hermes"):
        chosen(tool_call_parser="nix")
    with pytest.raises(SettingsError, match=r"TRIVET_API__REASONING_PARSER.*'nix'.*qwen3"):
        chosen(reasoning="nix")


def test_workers_know_the_reasoning_parser(tiny: Any) -> None:
    """Engines hold a grammar back until the reasoning has ended."""
    from workers import engine_args

    def parser(**given: Any) -> Any:
        with mock.patch.dict(os.environ):  # an engine's own variables
            built = engine_args.build(Settings(model=str(tiny), **given), None)
        return built.create_structured_outputs_config().reasoning_parser

    assert parser(api={"reasoning_parser": "qwen3"}) == "qwen3"
    assert parser(engine={"args": "--reasoning-parser glm45"}) == "glm45"
    assert parser() == ""


@pytest.fixture(scope="module")
def thinking(vllm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with the mark of one that may be asked not to think in its template."""
    folder = tiny_model.build(tmp_path_factory.mktemp("thinking") / "tiny")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{%- if enable_thinking is false %}<think></think>{%- endif %}")
    return folder


@pytest.mark.parametrize(("named", "expected"), [(None, "qwen3"), ("none", ""), ("granite", "granite")])
def test_api_and_workers_agree_on_what_the_model_tells(thinking: Path, named: str | None, expected: str) -> None:
    from api.vllm_serving import config_of
    from workers import engine_args

    settings = Settings(model=str(thinking), api={"reasoning_parser": named})
    with mock.patch.dict(os.environ):
        built = engine_args.build(settings, None)
    assert built.create_structured_outputs_config().reasoning_parser == expected
    assert config_of(settings).structured_outputs_config.reasoning_parser == expected


def test_a_worker_that_only_encodes_does_not_look(thinking: Path) -> None:
    from workers import engine_args

    with mock.patch.dict(os.environ):
        settings = Settings(model=str(thinking), enable_multimodal=True, worker={"roles": "encode"})
        assert not engine_args.build(settings, None).reasoning_parser


@pytest.mark.usefixtures("vllm")
def test_every_parser_that_may_be_chosen_exists() -> None:
    from vllm.reasoning import ReasoningParserManager

    chosen = {parser for _, _, parser in REASONING if parser}
    assert chosen <= set(ReasoningParserManager.list_registered())


REASONING: list[tuple[str, str, str | None]] = [
    ("qwen3", "{%- if enable_thinking is false %}<think>\\n\\n</think>{%- endif %}", "qwen3"),
    ("qwen3_vl_moe", "'<|im_start|>assistant\\n<think>\\n'", "qwen3"),
    ("qwen3_moe", "{{- '<|im_start|>assistant\\n' }}", None),
    ("qwen3_vl", "content.split('</think>')[-1]", None),
    ("qwen2", "'<|im_start|>assistant\\n<think>\\n'", "deepseek_r1"),
    ("qwen2", "{{- '<|im_start|>assistant\\n' }}", None),
    ("deepseek_v3", "content.split('</think>') {{'<｜Assistant｜><think>\\n'}}", "deepseek_r1"),
    ("llama", "content.split('</think>') {{'<｜Assistant｜><think>\\n'}}", "deepseek_r1"),
    (
        "deepseek_v3",
        "{{'<｜Assistant｜>'}}{%- if not thinking %}{{'</think>'}}{%- else %}",
        "deepseek_v3",
    ),
    ("deepseek_v3", "{{'<｜Assistant｜>'}}", None),
    ("glm4_moe", "'<think></think>' if enable_thinking is false", "glm45"),
    ("glm4_moe", "no reasoning here", None),
    ("granite", "Write 'Here is my thought process:' and", "granite"),
    ("seed_oss", "<seed:think>", "seed_oss"),
    ("hunyuan_v1_moe", "<think>\\n\\n</think>", "hunyuan_a13b"),
    ("llama", "<think></think>", None),
]


@pytest.mark.parametrize(("model_type", "template", "parser"), REASONING)
def test_the_model_says_how_it_writes_reasoning(model_type: str, template: str, parser: str | None) -> None:
    assert vllm_reasoning.of_model(model_type, template) == parser
