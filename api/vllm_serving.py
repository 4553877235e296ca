"""Adapter to vLLM: its OpenAI serving classes over the pipeline. The only module that builds them."""

from __future__ import annotations

import os
from typing import Any

from api.pipeline import Pipeline
from app import torchvision_ops, vllm_args
from app.errors import Failure, InvalidRequest, ModelNotFound
from app.settings import Settings


class Serving:
    """vLLM's serving layer for one model. Building it loads tokenizer, template and processor, and takes seconds."""

    def __init__(self, settings: Settings, pipeline: Pipeline) -> None:
        config = _config(settings)
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.renderers.online_renderer import OnlineRenderer

        from api.vllm_chat import Chat
        from api.vllm_client import PipelineClient

        self._name = settings.served_name
        self.client = PipelineClient(config, pipeline)
        self.models = OpenAIServingModels(self.client, [BaseModelPath(name=self._name, model_path=settings.model)])
        template: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
        renderer = OnlineRenderer(config.model_config, self.client.renderer, request_logger=None, **template)
        renderer.warmup()
        self._chat = Chat(
            self.client,
            self.models,
            "assistant",
            online_renderer=renderer,
            request_logger=None,
            enable_prompt_tokens_details=True,
            **template,
        )

    @property
    def max_model_len(self) -> int:
        return int(self.client.model_config.max_model_len)

    def chat_request(self, body: dict[str, Any], request_id: str) -> Any:
        """vLLM's request model. Raises pydantic's ValidationError, InvalidRequest or ModelNotFound."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.exceptions import VLLMValidationError

        try:
            request = ChatCompletionRequest.model_validate({**body, "request_id": request_id})
        except VLLMValidationError as error:
            # Its text would repeat the value.
            raise InvalidRequest(str(error.args[0])[:500], param=error.parameter) from error
        if request.model and request.model != self._name:
            raise ModelNotFound(f"the model does not exist; this server has: {self._name}", param="model")
        return request

    async def chat(self, request: Any) -> Any:
        """An async generator of SSE frames, a response model, or raises; never vLLM's ErrorResponse."""
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        answer = await self._chat.create_chat_completion(request, None)
        if isinstance(answer, ErrorResponse):
            raise ServingError(answer.error.model_dump())
        return answer

    async def list_models(self) -> Any:
        return await self.models.show_available_models()

    def shutdown(self) -> None:
        self.client.shutdown()


class ServingError(Exception):
    """An error in vLLM's own shape: {message, type, param, code}, code being the HTTP status."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("message"))
        self.error = error

    def failure(self) -> Failure:
        status = self.error.get("code")
        status = status if isinstance(status, int) and 400 <= status < 600 else 500
        message = str(self.error.get("message"))
        too_long = "maximum context length" in message or "context length" in message
        code = "context_length_exceeded" if too_long else _CODES.get(status, "internal_error")
        return Failure(status, code, message[:500], self.error.get("param"))


_CODES = {400: InvalidRequest.code, 404: ModelNotFound.code, 422: InvalidRequest.code}


def explain(error: Exception) -> ServingError:
    """What vLLM makes of an exception that its serving code let through."""
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.exceptions import VLLMValidationError

    answer = create_error_response(error).error.model_dump()
    if isinstance(error, VLLMValidationError):
        answer["message"] = str(error.args[0])  # its whole text would repeat the value
    return ServingError(answer)


def _config(settings: Settings) -> Any:
    """A VllmConfig of a process that has no engine and may have no GPU (as vLLM's own render server makes it)."""
    torchvision_ops.define()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", settings.log_level)
    from api import vllm_media

    os.environ["VLLM_MEDIA_CONNECTOR"] = vllm_media.NAME
    from vllm.config import VllmConfig

    args = vllm_args.parse(settings.model, vllm_args.split(settings.engine.args))
    args.mm_processor_cache_gb = 0
    model_config = args.create_model_config()
    # Nothing is computed here, so no kernel has to support the quantization.
    model_config.quantization = None
    return VllmConfig(
        model_config=model_config,
        structured_outputs_config=args.create_structured_outputs_config(),
    )
