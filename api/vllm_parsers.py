"""Adapter to vLLM: which of its parsers read tool calls and reasoning out of a model's text."""

from __future__ import annotations

import logging
from typing import Any

from app.settings import SettingsError
from app.settings_sections import ApiSettings

log = logging.getLogger(__name__)


def chosen(settings: ApiSettings, config: Any, tokenizer: Any) -> dict[str, Any]:
    """Arguments for vLLM's serving classes: what the settings name, else what the model says itself.

    The configuration has the reasoning parser (see `app.vllm_reasoning`). A tool parser follows from the tokenizer's
    own description of answers, or from the way in which the chat template writes calls; otherwise there is none, and
    requests with tools get 400. Raises SettingsError for names that vLLM does not know.
    """
    tools = settings.tool_call_parser or _of_model(config, tokenizer)
    auto = settings.enable_auto_tool_choice
    if auto and tools is None:
        raise SettingsError(
            "api.enable_auto_tool_choice (TRIVET_API__ENABLE_AUTO_TOOL_CHOICE): the model does not say how it writes "
            "tool calls; name a parser with api.tool_call_parser"
        )
    found = {
        "tool_parser": tools,
        "reasoning_parser": config.structured_outputs_config.reasoning_parser,
        "enable_auto_tools": tools is not None if auto is None else auto,
    }
    _check(found)
    log.info("tool calls: %s, reasoning: %s", tools or "none", found["reasoning_parser"] or "none")
    return found


def _check(found: dict[str, Any]) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for setting, name, known in (
        ("tool_call_parser", found["tool_parser"], ToolParserManager.list_registered()),
        ("reasoning_parser", found["reasoning_parser"], ReasoningParserManager.list_registered()),
    ):
        if name and name not in known:
            raise SettingsError(
                f"api.{setting} (TRIVET_API__{setting.upper()}): vLLM has no parser {name!r}; it has: "
                + ", ".join(sorted(known))
            )


def _of_model(config: Any, tokenizer: Any) -> str | None:
    from vllm.parser.response_template import resolve_response_template

    if config.model_config.hf_config.model_type == "gpt_oss":
        return "openai"
    described = resolve_response_template(tokenizer)
    if described is not None and "tool_calls" in described.get("fields", {}):
        return "hf"
    template = getattr(tokenizer, "chat_template", None)
    return _of_template(template) if isinstance(template, str) else None


def _of_template(template: str) -> str | None:
    """Only forms that no two parsers share."""
    if "<tool_call>" not in template or "</tool_call>" not in template:
        return None
    if "<function=" in template:
        return "qwen3_coder"
    return "hermes" if '{"name":' in template.replace('\\"', '"').replace(" ", "") else None
