"""Adapter to vLLM: its chat serving, with a fast lane for plain streams and the workers' word on media tokens."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from api import fast_lane


class Chat(OpenAIServingChat):
    """`result_generator` is always an `Outputs` of ours."""

    def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, request_id: str, model_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """An async generator of frames: bytes in the fast lane, text otherwise."""
        if not fast_lane.takes(request, parsers=self.parser_cls is not None):
            kwargs["mm_token_counts"] = result_generator.media_tokens
            return super().chat_completion_stream_generator(
                request, result_generator, request_id, model_name, *args, **kwargs
            )
        usage = bool(request.stream_options and request.stream_options.include_usage)
        role = self.get_chat_request_role(request)
        writer = fast_lane.Writer(request_id, model_name, role, self.system_fingerprint, usage=usage)
        return fast_lane.frames(
            result_generator.deltas(), writer, len(result_generator.job.prompt.token_ids), usage=usage
        )

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs["mm_token_counts"] = result_generator.media_tokens
        return await super().chat_completion_full_generator(request, result_generator, *args, **kwargs)
