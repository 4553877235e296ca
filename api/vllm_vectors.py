"""Adapter to vLLM: the vector of one input, as its engine would answer it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from vllm.outputs import PoolingRequestOutput

from api import vllm_outputs
from api.context import RequestContext
from api.iterated import Iterated
from api.job import Job
from api.pipeline import Pipeline
from app.errors.base import TrivetError
from app.messages.deltas import Delta


class Vector(Iterated[PoolingRequestOutput]):
    """What `encode` answers: one output, when it is the input's turn and a worker has made it.

    Of a request that is over none begins any more: vLLM closes them one after another, and each lets another one in.
    """

    def __init__(self, pipeline: Pipeline, context: RequestContext, job: Job, request_id: str) -> None:
        super().__init__()
        self.job = job
        self._pipeline = pipeline
        self._context = context
        self._request_id = request_id

    async def _outputs(self) -> AsyncGenerator[PoolingRequestOutput, None]:
        try:
            async with self._context.inputs:
                if self._context.over:
                    return
                final = await self._final()
        except TrivetError as error:
            self._context.over = True
            self._context.failure = error.failure()
            raise vllm_outputs.PipelineError(error) from error
        yield vllm_outputs.pooled(self._request_id, self.job.prompt.token_ids, final)

    async def aclose(self) -> None:
        self._context.over = True
        await super().aclose()

    async def _final(self) -> Delta:
        timings, stream = self._context.timings, self._pipeline.stream
        async with aclosing(stream(self.job) if timings is None else timings.stream(self.job, stream)) as steps:
            return [delta async for deltas in steps for delta in deltas][-1]
