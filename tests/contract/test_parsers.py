"""Which of vLLM's parsers a model gets."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from app.settings import SettingsError
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
    from app.settings import Settings
    from workers import engine_args

    def parser(**given: Any) -> Any:
        with mock.patch.dict(os.environ):  # an engine's own variables
            built = engine_args.build(Settings(model=str(tiny), **given), None)
        return built.create_structured_outputs_config().reasoning_parser

    assert parser(api={"reasoning_parser": "qwen3"}) == "qwen3"
    assert parser(engine={"args": "--reasoning-parser glm45"}) == "glm45"
