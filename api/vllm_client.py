"""Adapter to vLLM: its `EngineClient` over the pipeline. vLLM's serving code thinks that this is an engine."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from vllm.engine.protocol import EngineClient
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.renderers.registry import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from api import vllm_grammars, vllm_outputs, vllm_short_prompts
from api.context import RequestContext, current
from api.fanout import interleave
from api.grammars import Known
from api.iterated import Iterated
from api.job import Job
from api.pipeline import Pipeline
from api.vllm_markers import Markers
from api.vllm_outputs import PipelineError
from api.vllm_vectors import Vector
from app import vllm_model
from app.errors.base import TrivetError
from app.errors.requests import InvalidRequest
from app.messages.deltas import Delta, joined
from app.messages.media import MediaRef
from app.messages.prompts import Prompt
from app.roles import Does

#: Where the engine input carries the references of a prompt's media.
MEDIA = "trivet_media"


class PipelineClient(EngineClient):
    """Answers what vLLM's serving layer asks of an engine. What needs a real engine raises NotImplementedError."""

    is_running, is_stopped, errored = True, False, False

    def __init__(self, config: Any, pipeline: Pipeline, grammars: Known) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.does = vllm_model.does(config.model_config)
        self.renderer = renderer_from_config(config)
        # The one place that would run the HF processor: here media stay references, and workers render.
        self.renderer._process_multimodal_async = _references
        vllm_short_prompts.install(self.renderer)
        self.input_processor = InputProcessor(config, self.renderer)
        self._markers = Markers(config.model_config, self.renderer.get_tokenizer())
        self._pipeline = pipeline
        self._grammars = grammars

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Not a coroutine, so that the request's context is read while its route runs."""
        context = current()
        # Defaults are left out, but the stages read this one themselves.
        params = msgspec.to_builtins(sampling_params) | {"max_tokens": sampling_params.max_tokens}
        job = replace(
            self._job(context, prompt, params, request_id, priority),
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )
        outputs = Outputs(
            self._pipeline, self._grammars, context, job, sampling_params, request_id, prompt.get("prompt")
        )
        context.on_close.append(outputs.aclose)
        return outputs  # type: ignore[return-value]  # vLLM only iterates over it

    def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        **_: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """vLLM's name for what pooling models do. No coroutine either."""
        context = current()
        params = {"dimensions": pooling_params.dimensions, "use_activation": pooling_params.use_activation}
        job = replace(self._job(context, prompt, params, request_id, priority), does=Does.EMBED)
        vector = Vector(self._pipeline, context, job, request_id)
        context.on_close.append(vector.aclose)
        return vector  # type: ignore[return-value]

    def _job(self, context: RequestContext, prompt: Any, params: dict[str, Any], request_id: str, priority: int) -> Job:
        if not prompt["prompt_token_ids"]:
            raise InvalidRequest("the prompt is empty")
        self._markers.check(prompt["prompt_token_ids"], prompt.get(MEDIA, []))
        return Job(
            request_id=f"{request_id}.{secrets.token_hex(3)}",
            prompt=prompt_of(prompt),
            params=params,
            deadline=context.deadline,
            priority=priority or context.priority,
            session=context.session,
            tenant=context.tenant,
            adapter=context.adapter.id if context.adapter is not None else "",
            on_decision=context.decided,
        )

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        return (str(self.does),)

    async def abort(self, request_id: Any) -> None:
        """vLLM closes the generator too, and that is what cancels."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """There is no engine here to have statistics."""

    async def check_health(self) -> None:
        """`/health/ready` answers for the fleet."""

    @property
    def dead_error(self) -> BaseException:
        return RuntimeError("no engine in this process")

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()


class Outputs(Iterated[RequestOutput]):
    """What `generate` answers. vLLM iterates over RequestOutputs; the fast lane takes the deltas themselves.

    `text` is the rendered prompt, where vLLM has it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        grammars: Known,
        context: RequestContext,
        job: Job,
        params: SamplingParams,
        request_id: str,
        text: str | None,
    ) -> None:
        super().__init__()
        self.job = job
        self._pipeline = pipeline
        self._grammars = grammars
        self._context = context
        self._params = params
        self._request_id = request_id
        self._text = text

    def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """The only choice's deltas, as they come."""
        steps = self._stream(_choices(self.job, self._params)[0])
        self._open.append(steps)
        return steps

    def _stream(self, job: Job) -> AsyncGenerator[list[Delta], None]:
        choose = self._tried if self._params.structured_outputs else self._pipeline.stream
        timings = self._context.timings
        return choose(job) if timings is None else timings.stream(job, choose)

    async def _tried(self, job: Job) -> AsyncGenerator[list[Delta], None]:
        """The job's deltas, once it is known that an engine can compile its grammar."""
        spec = job.params["structured_outputs"]
        ready = vllm_grammars.chosen(spec, await self._grammars(spec))
        async with aclosing(
            self._pipeline.stream(replace(job, params={**job.params, "structured_outputs": ready}))
        ) as on:
            async for deltas in on:
                yield deltas

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        choices = _choices(self.job, self._params)
        streams = [self._stream(one) for one in choices]
        steps = interleave(streams) if len(streams) > 1 else _one(streams[0])
        whole = self._params.output_kind == RequestOutputKind.FINAL_ONLY
        parts: dict[int, list[Delta]] = {index: [] for index in range(len(choices))}
        early: dict[int, list[Delta]] = {}
        ended = 0
        try:
            async for index, deltas in steps:
                self._context.media_tokens.update(deltas[0].media_tokens or {})
                ended += deltas[-1].final
                if whole:
                    parts[index] += deltas
                    continue
                if not deltas[-1].answers:
                    early[index] = deltas  # vLLM wants it with the first token
                    continue
                deltas = early.pop(index, []) + deltas
                parts[index] = parts[index] or deltas[:1]
                output = self._output(index, deltas, parts[index][0])
                output.finished = ended == len(choices)
                yield output
        except TrivetError as error:
            self._context.failure = error.failure()
            raise PipelineError(error) from error
        finally:
            await steps.aclose()
        if whole:
            yield vllm_outputs.one_of([self._output(index, deltas, deltas[0]) for index, deltas in parts.items()])

    def _output(self, index: int, deltas: list[Delta], first: Delta) -> RequestOutput:
        """`first` is the choice's first delta, which has what is known of the prompt. As vLLM does, repeat it."""
        one = joined(deltas)
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._text,
            prompt_token_ids=first.prompt_token_ids or self.job.prompt.token_ids,
            prompt_logprobs=vllm_outputs.prompt_logprobs(one),
            outputs=[vllm_outputs.completion(index, one)],
            finished=one.final,
            num_cached_tokens=first.cached_tokens,
            num_cache_creation_tokens=first.created_cache_tokens,
        )


def _needs_an_engine(name: str) -> Any:
    async def method(self: PipelineClient, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} needs an engine; the API process has none")

    return method


for _name in list(PipelineClient.__abstractmethods__):
    setattr(PipelineClient, _name, _needs_an_engine(_name))
PipelineClient.__abstractmethods__ = frozenset()


def prompt_of(engine_input: Any) -> Prompt:
    """The prompt in what vLLM's renderer made for an engine."""
    return Prompt(
        token_ids=engine_input["prompt_token_ids"],
        media=engine_input.get(MEDIA, []),
        cache_salt=engine_input.get("cache_salt"),
    )


async def _references(prompt: list[int], mm_data: Any, **_: Any) -> dict[str, Any]:
    """In place of vLLM's processor: the prompt as it is, and the references of its media.

    Those of a modality are in the order of their placeholders; between modalities the order means nothing.
    """
    media: list[MediaRef] = [ref for refs in mm_data.values() for ref in refs]
    return {
        "type": "multimodal",
        "prompt_token_ids": prompt,
        "mm_kwargs": {},
        "mm_hashes": {},
        "mm_placeholders": {},
        MEDIA: media,
    }


async def _one(stream: AsyncGenerator[list[Delta], None]) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    try:
        async for deltas in stream:
            yield 0, deltas
    finally:
        await stream.aclose()


def _choices(job: Job, params: SamplingParams) -> list[Job]:
    """n > 1 as n jobs: a KV transfer serves one reader, so each choice prefills, and the prefix cache makes it cheap.

    Seeds differ as in vLLM's own fan-out: seed + index.
    """
    jobs = []
    for index in range(params.n):
        values = {**job.params, "n": 1}
        if params.seed is not None:
            values["seed"] = params.seed + index
        jobs.append(replace(job, request_id=f"{job.request_id}.{index}", params=values))
    return jobs
