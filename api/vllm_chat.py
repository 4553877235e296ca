"""Adapter to vLLM: its chat and messages serving, with a fast lane and the workers' word on media tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from vllm.entrypoints.anthropic.protocol import AnthropicContextManagement, AnthropicCountTokensResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError

from api import fast_lane, final_chunk
from api.context import current
from api.service_tier import tiered
from api.vllm_client import MEDIA


class MediaTokens(OpenAIServingChat):
    """Counts what the worker counted: the prompt here has one placeholder for a medium."""

    def chat_completion_stream_generator(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["mm_token_counts"] = current().media_tokens
        return super().chat_completion_stream_generator(*args, **kwargs)

    async def chat_completion_full_generator(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["mm_token_counts"] = current().media_tokens
        return await super().chat_completion_full_generator(*args, **kwargs)


class Chat(MediaTokens):
    """Plain streams take the fast lane; their `result_generator` is always an `Outputs` of ours."""

    def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, request_id: str, model_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """An async generator of frames: bytes in the fast lane, text otherwise."""
        if not fast_lane.takes(request, parsers=self._is_parsed(request)):
            slow = super().chat_completion_stream_generator(
                request, result_generator, request_id, model_name, *args, **kwargs
            )
            return tiered(final_chunk.alone(slow) if request.tools else slow, request)
        usage = bool(request.stream_options and request.stream_options.include_usage)
        role = self.get_chat_request_role(request)
        writer = fast_lane.Writer(request_id, model_name, role, self.system_fingerprint, usage=usage)
        prompt_tokens = len(result_generator.job.prompt.token_ids)
        return tiered(fast_lane.frames(result_generator.deltas(), writer, prompt_tokens, usage=usage), request)

    def _is_parsed(self, request: Any) -> bool:
        """Whether a parser reads the text. A tool parser lets it pass where no tool may be called."""
        if self.parser_cls is None:
            return False
        calls = bool(request.tools) and request.tool_choice != "none"
        return calls or self.parser_cls.reasoning_parser_cls is not None


class Messages(MediaTokens, AnthropicServingMessages):
    """Anthropic's messages over chat."""

    @classmethod
    def to_chat_completion_request(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().to_chat_completion_request(*args, **kwargs)
        made.request_id = current().request_id
        return made

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """vLLM's, which does not know chat's error frames. Raises GenerationError in place of one."""
        failed: list[str] = []
        try:
            async for event in super().message_stream_converter(_until_error(generator, failed)):
                yield event
        finally:
            await generator.aclose()
        if failed:
            raise GenerationError(orjson.loads(failed[0].removeprefix("data: "))["error"]["message"])

    async def prompt_tokens(self, request: Any) -> Any:
        """An AnthropicCountTokensResponse. Media are counted by a worker, for which one token has to be generated."""
        disabled = request.thinking is not None and request.thinking.type == "disabled"
        chat = self.to_chat_completion_request(
            request,
            merge_inline_system=self._merge_inline_system,
            disabled_thinking_effort=await self._get_disabled_thinking_effort() if disabled else "none",
        )
        rendered = await self.render_chat_request(chat)
        if isinstance(rendered, ErrorResponse):
            return rendered
        _, (engine_input,) = rendered
        count = len(engine_input["prompt_token_ids"])
        if engine_input.get(MEDIA):
            chat.max_tokens = chat.max_completion_tokens = 1
            answer = await self.create_chat_completion(chat)
            if isinstance(answer, ErrorResponse):
                return answer
            count = answer.usage.prompt_tokens
        context = AnthropicContextManagement(original_input_tokens=count)
        return AnthropicCountTokensResponse(input_tokens=count, context_management=context)


async def _until_error(frames: AsyncGenerator[str, None], failed: list[str]) -> AsyncGenerator[str, None]:
    async for frame in frames:
        if frame.startswith('data: {"error"'):
            failed.append(frame)
            return
        yield frame
