"""Adapter to vLLM: its completions serving, with the cached tokens of all prompts and not of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

from api.service_tier import tiered

USAGE_HEAD = "data: "


class Completion(OpenAIServingCompletion):
    """Completions of one prompt or several."""

    def completion_stream_generator(
        self, request: Any, engine_inputs: list[Any], result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if len(engine_inputs) == 1:
            frames = super().completion_stream_generator(request, engine_inputs, result_generator, *args, **kwargs)
            return tiered(frames, request)
        cached: dict[int, int] = {}
        frames = super().completion_stream_generator(
            request, engine_inputs, _counted(result_generator, cached), *args, **kwargs
        )
        return tiered(_corrected(frames, cached), request)

    def request_output_to_completion_response(self, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        answer = super().request_output_to_completion_response(outputs, *args, **kwargs)
        if (details := answer.usage.prompt_tokens_details) is not None:
            details.cached_tokens = sum(one.num_cached_tokens or 0 for one in outputs)
        return answer


async def _counted(outputs: AsyncGenerator[Any, None], cached: dict[int, int]) -> AsyncGenerator[Any, None]:
    try:
        async for index, output in outputs:
            cached.setdefault(index, output.num_cached_tokens or 0)
            yield index, output
    finally:
        await outputs.aclose()


async def _corrected(frames: AsyncGenerator[str, None], cached: dict[int, int]) -> AsyncGenerator[str, None]:
    """The usage chunk, which has no choices, counts what all prompts found in the cache."""
    try:
        async for frame in frames:
            yield _with_cached(frame, sum(cached.values())) if '"choices":[]' in frame else frame
    finally:
        await frames.aclose()


def _with_cached(frame: str, tokens: int) -> str:
    chunk = orjson.loads(frame.removeprefix(USAGE_HEAD))
    if not chunk["choices"] and (details := chunk["usage"].get("prompt_tokens_details")) is not None:
        details["cached_tokens"] = tokens
    return f"{USAGE_HEAD}{orjson.dumps(chunk).decode()}\n\n"
