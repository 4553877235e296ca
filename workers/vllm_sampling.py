"""Adapter to vLLM: a task's sampling parameters as vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm import SamplingParams

from app.errors.requests import InvalidRequest


class Tried(SamplingParams):
    """With a structured output that the API has validated and compiled.

    vLLM would validate it again on the loop that serves all requests of this worker, which stand still meanwhile.
    """

    def _validate_structured_outputs(self, *_: Any) -> None:
        """It is as vLLM's validation left it."""


def params(values: dict[str, Any]) -> SamplingParams:
    """Raises InvalidRequest."""
    tried = (values.get("structured_outputs") or {}).get("_backend") is not None
    try:
        return msgspec.convert(values, Tried if tried else SamplingParams, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"sampling parameters: {error}") from error
