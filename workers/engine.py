"""Adapter to vLLM: one AsyncLLM, as the stages see it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from app.errors.requests import InvalidRequest
from app.errors.serving import EncodeFailed, EngineFailed, WorkerLost
from app.messages.tasks import EmbedTask, StageTask
from app.registry import EngineState
from app.settings import Settings
from workers import engine_args, prompt_logprobs
from workers.kv_events import sources
from workers.kv_events.subscription import Source
from workers.loras import EngineLoras
from workers.vllm_errors import clean

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
#: vLLM's parameter of a request that asks for events of the blocks that it finds in the cache.
REPORT = "kv_cache_report_mode"


class Prefilled(NamedTuple):
    """What a prefill gave: vLLM's `kv_transfer_params` for whoever decodes, and what was asked about the prompt.

    `prompt_logprobs` are vLLM's, None if they were not asked for, `cached_tokens` were not computed,
    `created_cache_tokens` are cached now, and `stats` are vLLM's times of the request.
    """

    kv: dict[str, Any]
    prompt_logprobs: Any
    cached_tokens: int | None
    created_cache_tokens: int | None
    stats: Any = None


class Engine:
    """The engine of this process. Build it on the loop that will use it, which then blocks while it loads.

    `embeddings` is the folder of the worker's embedding store, if it has one, and `sockets` the one that KV events are
    published in, if they are. While `reporting` says so, blocks that a request finds in the cache are published, too.
    """

    def __init__(self, settings: Settings, embeddings: Path | None, sockets: Path | None = None) -> None:
        engine_args.prepare_environment(settings)
        from vllm.v1.engine.async_llm import AsyncLLM

        from workers.load import Load
        from workers.renderer import Renderer

        self.load = Load()
        self._llm: Any = AsyncLLM.from_engine_args(
            engine_args.build(settings, embeddings, sockets), stat_loggers=[self.load.logger]
        )
        self._config = self._llm.vllm_config
        self.loras = EngineLoras(self._llm)
        self._max_prompt_logprobs = settings.stream.max_prompt_logprobs
        self.renderer = Renderer(self._llm.renderer, self._config)
        self.reporting: Callable[[], bool] = lambda: False

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
    def event_block_size(self) -> int:
        """Tokens in a block as KV events count them: one of full attention, which `block_size` is not in every hybrid
        model."""
        return int(self._config.cache_config.effective_attention_block_size or self.block_size)

    @property
    def kv_event_sources(self) -> dict[int, Source]:
        """Where KV events are published, by data-parallel rank."""
        return sources.of(self._llm)

    @property
    def data_parallel_size(self) -> int:
        return int(self._config.parallel_config.data_parallel_size)

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    def state(self) -> EngineState:
        import vllm

        loras = self.loras.limits
        return EngineState(
            vllm=vllm.__version__,
            max_model_len=self.max_model_len,
            block_size=self.event_block_size,
            kv_tokens=self.kv_tokens,
            data_parallel_size=self.data_parallel_size,
            max_loras=loras.running if loras else 0,
            max_cpu_loras=loras.held if loras else 0,
            resident_loras=self.loras.resident,
            kv_usage=self.load.kv_usage,
            running=self.load.running,
            waiting=self.load.waiting,
        )

    async def encode(self, engine_input: Any, name: str) -> None:
        """Run the encoder on the prompt's items. A connector, not this answer, brings the embeddings out."""
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        final: Any = None
        try:
            async for output in self._llm.generate(engine_input, SamplingParams(max_tokens=1, temperature=0.0), name):
                final = output
        except EngineDeadError as error:
            raise WorkerLost("the worker's engine died") from error
        except ValueError as error:
            raise EncodeFailed(f"the engine refused the item: {clean(error)}") from error
        reason = final.outputs[0].finish_reason if final is not None else None
        if reason not in ("stop", "length"):
            raise EncodeFailed(f"the engine could not encode the item ({reason}; see the worker's log)")

    async def prefill(self, engine_input: Any, task: StageTask) -> Prefilled:
        """Fill the KV cache. For log-probabilities of the prompt vLLM computes all of it, cached or not."""
        params = _params(task.params)
        self._check(params, engine_input)
        # What is sampled here is thrown away, so nothing that shapes sampling has a place here.
        params.max_tokens, params.min_tokens, params.stop, params.structured_outputs = 1, 0, [], None
        params.logprobs, params.output_kind = None, _final_only()
        params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": KEEP_FOR_DECODE}
        final: Any = None
        async for output in self._generate(
            engine_input, params, f"{task.request_id}:prefill", task, task.plan.prefill_rank
        ):
            final = output
        if final is None or final.kv_transfer_params is None:
            reason = "nothing" if final is None else final.outputs[0].finish_reason
            raise EngineFailed(f"prefill ended without KV blocks to hand on ({reason})")
        cached, created = final.num_cached_tokens, final.num_cache_creation_tokens
        return Prefilled(dict(final.kv_transfer_params), final.prompt_logprobs, cached, created, final.metrics)

    def generate(self, engine_input: Any, task: StageTask, kv: dict[str, Any] | None) -> AsyncIterator[Any]:
        """The request's outputs, one for each engine step. With `kv` the prompt's blocks are pulled, not computed."""
        params = _params(task.params)
        if kv is None:
            self._check(params, engine_input)
        else:
            # The prefill engine gave these. Asked for them, or to read no blocks, vLLM would compute the prompt anew.
            params.prompt_logprobs, params.skip_reading_prefix_cache = None, False
            # What is wanted whole comes in steps too: the stage joins them.
            params.output_kind = _steps_of(params.output_kind)
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": kv}
        return self._generate(engine_input, params, task.request_id, task, task.plan.decode_rank)

    def _check(self, params: Any, engine_input: Any) -> None:
        tokens, vocabulary = len(engine_input["prompt_token_ids"]), self._config.model_config.get_vocab_size()
        prompt_logprobs.check(params.prompt_logprobs, tokens, vocabulary, self._max_prompt_logprobs)

    async def embeds(self) -> bool:
        """Whether it makes embeddings: of pooling models some classify or rank instead."""
        return "embed" in await self._llm.get_supported_tasks()

    async def embed(self, engine_input: Any, task: EmbedTask) -> Any:
        """vLLM's PoolingRequestOutput, with the prompt's vector."""
        from vllm import PoolingParams

        params = PoolingParams(task="embed", **task.params)
        adapter = self.loras.request(task.adapter)
        final: Any = None
        async for output in _explained(
            self._llm.encode(engine_input, params, task.request_id, lora_request=adapter, priority=task.priority)
        ):
            final = output
        return final

    def _generate(self, engine_input: Any, params: Any, name: str, task: StageTask, rank: int) -> AsyncIterator[Any]:
        # Always: with one of a client's, blocks would count as held twice and never as gone.
        mode = "full" if self.reporting() else "incremental"
        params.extra_args = {**(params.extra_args or {}), REPORT: mode}
        outputs = self._llm.generate(
            engine_input,
            params,
            name,
            lora_request=self.loras.request(task.adapter),
            priority=task.priority,
            data_parallel_rank=rank if self.data_parallel_size > 1 else None,
            reasoning_ended=task.reasoning_ended,
            reasoning_parser_kwargs=task.reasoning_parser_kwargs,
        )
        return _explained(outputs)

    async def reject(self, request_id: str, kv: dict[str, Any]) -> None:
        """Tell the prefill engine that nobody will read these blocks, so that it frees them before their lease ends."""
        await self._llm.notify_kv_transfer_request_rejected(request_id, kv)

    def shutdown(self) -> None:
        self._llm.shutdown(timeout=1)


async def _explained(outputs: Any) -> AsyncIterator[Any]:
    """The engine's outputs, and its errors as ours."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async for output in outputs:
            yield output
    except EngineDeadError as error:
        raise WorkerLost("the worker's engine died") from error
    except (VLLMClientError, ValueError) as error:
        raise InvalidRequest(clean(error)) from error
    finally:
        await outputs.aclose()


def _steps_of(kind: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA if kind == RequestOutputKind.FINAL_ONLY else kind


def _final_only() -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


def _params(values: dict[str, Any]) -> Any:
    from workers import vllm_sampling

    return vllm_sampling.params(values)
