"""Adapter to vLLM: its OpenAI serving classes over the pipeline. The only module that builds them."""

from __future__ import annotations

import os
from typing import Any

from api import choices, context, service_tier, vllm_parsers
from api.grammars import Known
from api.pipeline import Pipeline
from app import torchvision_ops, vllm_args, vllm_reasoning
from app.adapter_registry import Published
from app.errors.base import Failure
from app.errors.requests import InvalidRequest, ModelNotFound, WrongEndpoint
from app.messages.prompts import Prompt
from app.roles import Does
from app.settings import Settings


class Serving:
    """vLLM's serving layer for one model. Building it loads tokenizer, template and processor, and takes seconds.

    `does` says for which of the endpoints there is one. `*_request` methods make vLLM's request model of a body, and
    raise pydantic's ValidationError, InvalidRequest, WrongEndpoint or ModelNotFound. The others answer it, and raise
    rather than answer vLLM's ErrorResponse.
    """

    def __init__(self, settings: Settings, pipeline: Pipeline, grammars: Known) -> None:
        config = config_of(settings)
        from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
        from vllm.renderers.online_renderer import OnlineRenderer

        from api.vllm_adapters import Models
        from api.vllm_client import PipelineClient

        self._name = settings.served_name
        self.client = PipelineClient(config, pipeline, grammars)
        self.does = self.client.does
        self.models = Models(self.client, self._name, settings.model)
        template: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
        parsers: dict[str, Any] = {}
        if self.does is Does.GENERATE:
            parsers = vllm_parsers.chosen(settings.api, config, self.client.renderer.tokenizer)
        renderer = OnlineRenderer(config.model_config, self.client.renderer, request_logger=None, **template, **parsers)
        renderer.warmup()
        self._tokenization = ServingTokenization(self.models, renderer, **template)
        if self.does is Does.GENERATE:
            self._build_text(renderer, {**template, **parsers})
        else:
            from api.vllm_embeddings import Embeddings

            self._embeddings = Embeddings(self.client, self.models)

    def _build_text(self, renderer: Any, chat: dict[str, Any]) -> None:
        from api.vllm_chat import Chat, Messages
        from api.vllm_completion import Completion
        from api.vllm_responses import Responses

        common: dict[str, Any] = {"online_renderer": renderer, "request_logger": None}
        common["enable_prompt_tokens_details"] = True
        chat = {**common, **chat}
        self._chat = Chat(self.client, self.models, "assistant", **chat)
        self._messages = Messages(self.client, self.models, "assistant", **chat)
        self._responses = Responses(self.client, self.models, **chat)
        self._completion = Completion(self.client, self.models, **common)

    @property
    def max_model_len(self) -> int:
        return int(self.client.model_config.max_model_len)

    def chat_request(self, body: dict[str, Any], request_id: str) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return choices.checked(self._request(ChatCompletionRequest, {**body, "request_id": request_id}))

    async def chat(self, request: Any) -> Any:
        """An async generator of SSE frames, or a ChatCompletionResponse."""
        answer = _sound(await self._chat.create_chat_completion(request, None))
        return _tiered(answer, request)

    async def chat_prompt(self, request: Any) -> Prompt:
        """The prompt of a chat request, which is then not answered."""
        from api.vllm_client import prompt_of

        _, (engine_input,) = _sound(await self._chat.render_chat_request(request))
        return prompt_of(engine_input)

    def completion_request(self, body: dict[str, Any], request_id: str) -> Any:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        return choices.checked(self._request(CompletionRequest, {**body, "request_id": request_id}))

    async def completion(self, request: Any) -> Any:
        """An async generator of SSE frames, or a CompletionResponse."""
        answer = _sound(await self._completion.create_completion(request, None))
        return _tiered(answer, request)

    def responses_request(self, body: dict[str, Any], request_id: str) -> Any:
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        return self._request(ResponsesRequest, {**body, "request_id": f"resp_{request_id}"})

    async def responses(self, request: Any) -> Any:
        """An async generator of vLLM's event models, or a ResponsesResponse."""
        return _sound(await self._responses.create_responses(request, None))

    def messages_request(self, body: dict[str, Any], *, count: bool = False) -> Any:
        """`count`: the request asks only for the number of its tokens."""
        from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest

        return self._request(AnthropicCountTokensRequest if count else AnthropicMessagesRequest, body)

    async def messages(self, request: Any) -> Any:
        """An async generator of SSE frames, or an AnthropicMessagesResponse."""
        return _sound(await self._messages.create_messages(request, None))

    async def count_tokens(self, request: Any) -> Any:
        return _sound(await self._messages.prompt_tokens(request))

    def embedding_request(self, body: dict[str, Any], request_id: str) -> Any:
        from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
        from vllm.exceptions import VLLMValidationError

        model = EmbeddingChatRequest if "messages" in body else EmbeddingCompletionRequest
        request = self._request(model, {**body, "request_id": request_id}, Does.EMBED)
        try:
            request.to_pooling_params().verify(self.client.model_config)
        except VLLMValidationError as error:
            raise InvalidRequest(str(error.args[0])[:500], param="dimensions") from error
        return request

    async def embed(self, request: Any) -> Any:
        """Starlette's response with an EmbeddingResponse, or with bytes for the formats that are not JSON."""
        return await self._embeddings(request)

    async def tokenize(self, body: dict[str, Any]) -> Any:
        from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest

        model = TokenizeChatRequest if "messages" in body else TokenizeCompletionRequest
        return _sound(await self._tokenization.create_tokenize(self._request(model, body, None), None))

    async def detokenize(self, body: dict[str, Any]) -> Any:
        from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest

        return _sound(await self._tokenization.create_detokenize(self._request(DetokenizeRequest, body, None), None))

    async def list_models(self, adapters: list[Published]) -> Any:
        """A ModelList."""
        return await self.models.listing(adapters)

    def shutdown(self) -> None:
        self.client.shutdown()

    def check_does(self, does: Does | None) -> None:
        """Raises WrongEndpoint. None is for what any model does."""
        if does not in (None, self.does):
            only = "makes embeddings: ask /v1/embeddings" if self.does is Does.EMBED else "does not make embeddings"
            raise WrongEndpoint(f"the served model {self._name} {only}")

    def _request(self, model: Any, body: dict[str, Any], does: Does | None = Does.GENERATE) -> Any:
        from vllm.exceptions import VLLMValidationError

        self.check_does(does)
        try:
            request = model.model_validate(body)
        except VLLMValidationError as error:
            # Its text would repeat the value.
            raise InvalidRequest(str(error.args[0])[:500], param=error.parameter) from error
        adapter = context.adapter()
        if request.model and request.model not in (self._name, adapter and adapter.name):
            raise ModelNotFound(f"the model does not exist; this server has: {self._name}", param="model")
        return request


def response_events(told: Any = None, ended: Any = None) -> Any:
    """What writes the events of one streamed response (see Events)."""
    from api.vllm_responses import Events

    return Events(told, ended)


def response_states(events: Any) -> Any:
    """An async generator of what a response is like, in place of its events."""
    from api.vllm_responses import states

    return states(events)


def _sound(answer: Any) -> Any:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    if isinstance(answer, ErrorResponse):
        raise ServingError(answer.error.model_dump())
    return answer


def _tiered(answer: Any, request: Any) -> Any:
    """A whole answer names the tier that was asked for; streams do so themselves."""
    if (tier := service_tier.asked(request)) is not None and hasattr(answer, "service_tier"):
        answer.service_tier = tier
    return answer


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


def keep_environment() -> None:
    """vLLM's variables are from now on what they are: it asks the environment for five of them in every request.

    Its engines do so when they have started. Raises ValueError for a variable whose value vLLM does not take.
    """
    from vllm import envs

    envs.enable_envs_cache()


def config_of(settings: Settings) -> Any:
    """A VllmConfig of a process that has no engine and may have no GPU (as vLLM's own render server makes it)."""
    torchvision_ops.define()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # There is one text at a time, and to wake the threads for it costs a quarter more.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", settings.log_level)
    from api import vllm_media

    os.environ["VLLM_MEDIA_CONNECTOR"] = vllm_media.NAME
    from vllm.config import VllmConfig

    args = vllm_args.parse(settings.model, vllm_args.split(settings.engine.args))
    args.mm_processor_cache_gb = 0
    args.served_model_name = settings.served_name  # as errors that clients see call it
    args.reasoning_parser = vllm_reasoning.of(settings.api.reasoning_parser, args)
    model_config = args.create_model_config()
    # Nothing is computed here, so no kernel has to support the quantization.
    model_config.quantization = None
    return VllmConfig(
        model_config=model_config,
        structured_outputs_config=args.create_structured_outputs_config(),
    )
