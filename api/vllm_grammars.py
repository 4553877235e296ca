"""Adapter to vLLM: what its engines make of a structured output, done here with their own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from app.settings import Settings

#: Fields of vLLM's StructuredOutputsParams that its validation sets.
CHOSEN = ("_backend", "_backend_was_auto")


class Compiler:
    """Compiles as an engine of this model does. Building it loads the tokenizer, and takes seconds."""

    def __init__(self, settings: Settings) -> None:
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        from api.vllm_serving import config_of

        self._config = config_of(settings)
        self._manager = StructuredOutputManager(self._config)
        self._manager._use_async_grammar_compilation = False
        self._usual = XgrammarBackend(self._config, self._manager.tokenizer, self._config.model_config.get_vocab_size())
        self._validated({"json": {"type": "string"}})  # what vLLM loads only then, no trial has to load

    def tried(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The fields of `spec`, StructuredOutputsParams as builtins, that vLLM's validation chooses.

        Validates, compiles, and fills the first mask, which is the engine's own loop's work. Raises what vLLM raises.
        """
        from vllm.v1.structured_output.request import StructuredOutputRequest

        params = self._validated(spec)
        chosen = params.structured_outputs
        self._manager.backend = self._usual if chosen._backend == "xgrammar" else None
        wanted = StructuredOutputRequest.from_sampling_params(params)
        request = SimpleNamespace(request_id="trial", sampling_params=params, structured_output_request=wanted)
        if wanted is not None:
            self._manager.grammar_init(request)
            grammar: Any = wanted.grammar
            if isinstance(grammar, Exception):
                raise grammar
            grammar.fill_bitmask(self._manager.backend.allocate_token_bitmask(1), 0)
        known: dict[str, Any] = {name: getattr(chosen, name) for name in CHOSEN}
        return known | {"choice_as_grammar": spec.get("choice") is not None and chosen.choice is None}

    def _validated(self, spec: dict[str, Any]) -> Any:
        """vLLM's SamplingParams, as its validation leaves them."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        given = {name: value for name, value in spec.items() if name not in CHOSEN}
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
        config = self._config.structured_outputs_config
        params._validate_structured_outputs(self._config.model_config, config, self._manager.tokenizer)
        return params


def chosen(spec: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The spec as vLLM's validation leaves it, so that no engine has to validate it again."""
    from vllm.v1.structured_output.utils import choice_as_grammar

    made = spec | {name: known[name] for name in CHOSEN}
    if known["choice_as_grammar"]:
        made |= {"choice": None, "grammar": choice_as_grammar(spec["choice"])}
    return made


def explain(error: Exception) -> str:
    """Without the pattern itself, which may be long, and without addresses."""
    from vllm.entrypoints.serve.exception_handling.error_response import sanitize_message

    return str(sanitize_message(str(error)))
