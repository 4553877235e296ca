"""Adapter to vLLM: one AsyncLLM, as the stages see it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from app.errors import EngineFailed, InvalidRequest, MediaRefused, PromptTooLong, WorkerLost
from app.media import MediaStore
from app.messages import Prompt, RenderedPrompt, StageTask
from app.registry import EngineState
from app.settings import Settings
from workers import engine_args

log = logging.getLogger(__name__)

#: What vLLM asks of a prefill engine: keep the blocks for another engine.
KEEP_FOR_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Engine:
    """The engine of this process. Build it on the loop that will use it, which then blocks while it loads."""

    def __init__(self, settings: Settings, media: MediaStore) -> None:
        engine_args.prepare_environment(settings)
        from vllm.v1.engine.async_llm import AsyncLLM

        from workers.load import LoadLogger

        self._media = media
        self._llm: Any = AsyncLLM.from_engine_args(
            engine_args.build(settings), stat_loggers=[LoadLogger.factory(self._take_load)]
        )
        self._config = self._llm.vllm_config
        self.kv_usage, self.running, self.waiting = 0.0, 0, 0

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored)

    @property
    def kv_tokens(self) -> int:
        return int(self._config.cache_config.kv_cache_size_tokens or 0)

    @property
    def block_size(self) -> int:
        return int(self._config.cache_config.block_size)

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    def state(self) -> EngineState:
        import vllm

        return EngineState(
            vllm=vllm.__version__,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_tokens=self.kv_tokens,
            kv_usage=self.kv_usage,
            running=self.running,
            waiting=self.waiting,
        )

    async def render(self, prompt: Prompt) -> Any:
        """vLLM's own input for the prompt; its processor runs on the media."""
        from vllm.inputs import tokens_input

        if not prompt.media:
            rendered: Any = tokens_input(prompt.token_ids, cache_salt=prompt.cache_salt)
        else:
            rendered = await self._render_media(prompt)
        length = len(rendered["prompt_token_ids"])
        if length >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {length} tokens; the model's context is {self.max_model_len}", param="messages"
            )
        return rendered

    async def _render_media(self, prompt: Prompt) -> Any:
        data: dict[str, list[Any]] = {}
        names: dict[str, list[str]] = {}
        for ref in prompt.media:
            content = await self._media.get(ref.identity)
            data.setdefault(ref.modality, []).append(await asyncio.to_thread(_load_image, content))
            names.setdefault(ref.modality, []).append(ref.identity)
        request = {"prompt_token_ids": prompt.token_ids, "multi_modal_data": data, "multi_modal_uuids": names}
        if prompt.cache_salt is not None:
            request["cache_salt"] = prompt.cache_salt
        try:
            (rendered,) = await self._llm.renderer.render_cmpl_async([request])
        except ValueError as error:
            raise MediaRefused(f"the model's processor refused the media: {_clean(error)}", param="messages") from error
        return rendered

    def input_of(self, prompt: RenderedPrompt) -> Any:
        from workers import rendered

        return rendered.engine_input(prompt)

    async def prefill(self, engine_input: Any, task: StageTask) -> dict[str, Any]:
        """Fill the KV cache; answers vLLM's `kv_transfer_params` for whoever decodes."""
        params = _params(task.params)
        # What is sampled here is thrown away, so nothing that shapes sampling has a place here.
        params.max_tokens, params.min_tokens, params.stop, params.structured_outputs = 1, 0, [], None
        params.logprobs, params.prompt_logprobs, params.output_kind = None, None, _final_only()
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": KEEP_FOR_DECODE}
        final: Any = None
        async for output in self._generate(engine_input, params, f"{task.request_id}:prefill", task):
            final = output
        if final is None or final.kv_transfer_params is None:
            reason = "nothing" if final is None else final.outputs[0].finish_reason
            raise EngineFailed(f"prefill ended without KV blocks to hand on ({reason})")
        return dict(final.kv_transfer_params)

    def generate(self, engine_input: Any, task: StageTask, kv: dict[str, Any] | None) -> AsyncIterator[Any]:
        """The request's outputs, one for each engine step. With `kv` the prompt's blocks are pulled, not computed."""
        params = _params(task.params)
        if kv is not None:
            # What is wanted whole comes in steps too: the stage joins them.
            params.output_kind = _steps_of(params.output_kind)
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": kv}
        return self._generate(engine_input, params, task.request_id, task)

    async def _generate(self, engine_input: Any, params: Any, name: str, task: StageTask) -> AsyncIterator[Any]:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        outputs = self._llm.generate(
            engine_input,
            params,
            name,
            priority=task.priority,
            reasoning_ended=task.reasoning_ended,
            reasoning_parser_kwargs=task.reasoning_parser_kwargs,
        )
        try:
            async for output in outputs:
                yield output
        except EngineDeadError as error:
            raise WorkerLost("the worker's engine died") from error
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(_clean(error)) from error
        finally:
            await outputs.aclose()

    async def reject(self, request_id: str, kv: dict[str, Any]) -> None:
        """Tell the prefill engine that nobody will read these blocks, so that it frees them before their lease ends."""
        await self._llm.notify_kv_transfer_request_rejected(request_id, kv)

    def shutdown(self) -> None:
        self._llm.shutdown(timeout=1)

    def _take_load(self, kv_usage: float, running: int, waiting: int) -> None:
        self.kv_usage, self.running, self.waiting = kv_usage, running, waiting


def _params(values: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    try:
        return msgspec.convert(values, SamplingParams, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"sampling parameters: {error}") from error


def _steps_of(kind: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA if kind == RequestOutputKind.FINAL_ONLY else kind


def _final_only() -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


def _load_image(content: bytes) -> Any:
    """Decode as vLLM's own loader does, so that the pixels are the same."""
    from vllm.multimodal.media.image import ImageMediaIO

    try:
        return ImageMediaIO().load_bytes(content)
    except ValueError as error:
        raise MediaRefused("the image cannot be decoded", param="messages") from error


def _clean(error: BaseException) -> str:
    """An error's text, short enough and without addresses of objects."""
    from vllm.entrypoints.serve.exception_handling.error_response import sanitize_message

    return str(sanitize_message(str(error)))[:500]
