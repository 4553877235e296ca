"""Adapter to vLLM: which of its parsers reads the reasoning out of a model's text. API and workers have to agree."""

from __future__ import annotations

import logging
import re
from typing import Any

from app import vllm_model
from app.roles import Does

log = logging.getLogger(__name__)

#: The setting's word for no parser, whatever the model is.
NONE = "none"
#: Types of models that all write their reasoning in one way, wherever their template knows of reasoning.
OF_TYPES = {"glm4_moe": "glm45", "glm4v_moe": "glm45", "hunyuan_v1_moe": "hunyuan_a13b"}
#: The prompt ends with the beginning of the reasoning.
BEGUN = re.compile(r"(assistant(\\n|\n)|<｜Assistant｜>)<think>")


def of(named: str | None, args: Any) -> str:
    """The parser that the setting names, or vLLM's own flag in `args`, or the one that the model tells; "" for none.

    vLLM itself finds that of gpt-oss. A model that makes embeddings writes nothing, whatever its template has in it.
    """
    if named is not None:
        return "" if named == NONE else named
    if args.reasoning_parser:
        return str(args.reasoning_parser)
    from vllm.tokenizers import cached_tokenizer_from_config

    config = args.create_model_config()
    if vllm_model.does(config) is Does.EMBED:
        return ""
    template = None if config.skip_tokenizer_init else cached_tokenizer_from_config(config).chat_template
    found = of_model(config.hf_config.model_type, template) if isinstance(template, str) else None
    if found is not None:
        log.info("the model writes its reasoning as vLLM's parser %r reads it", found)
    return found or ""


def of_model(model_type: str, template: str) -> str | None:
    """By the type of the model and what its chat template writes around reasoning; None where that leaves a doubt."""
    if model_type == "seed_oss":
        return "seed_oss"
    if "Here is my thought process:" in template:
        return "granite"
    if "</think>" not in template and "<think>" not in template:
        return None
    if model_type in OF_TYPES:
        return OF_TYPES[model_type]
    begun = BEGUN.search(template) is not None
    if "<｜Assistant｜>" in template:
        # Where a request may choose, the template closes what the model is not to write.
        return "deepseek_v3" if "<｜Assistant｜></think>" in template or "not thinking" in template else _begun(begun)
    if model_type.startswith("qwen3"):
        return "qwen3" if begun or "enable_thinking" in template else None
    return _begun(begun and model_type == "qwen2")


def _begun(begun: bool) -> str | None:
    """QwQ, DeepSeek R1 and what was distilled from it: the answer has only the end of the reasoning in it."""
    return "deepseek_r1" if begun else None
