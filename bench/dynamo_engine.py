"""A Dynamo worker without an engine, for its front end: answers with the prompt's own tokens, one a step.

    PYTHON -m bench.dynamo_engine --model DIR --step-ms 50      (PYTHON: of an environment with ai-dynamo)

Dynamo's own mocker names tokens that have no text in a small vocabulary, so that its front end would write none.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

from bench.steps import Steps

MODEL = "bench"


async def main(model: str, step_s: float) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("bench.backend.generate")
    steps = Steps(step_s)

    async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        prompt, count = request["token_ids"], request["stop_conditions"]["max_tokens"]
        async for new in steps.tokens(count):
            chunk = {"token_ids": [prompt[number % len(prompt)] for number in new], "index": 0}
            yield chunk | ({"finish_reason": "length"} if new.stop == count else {})

    async with asyncio.TaskGroup() as group:
        group.create_task(steps.run())
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            model,
            model_name=MODEL,
            worker_type=WorkerType.Aggregated,
            ignore_weights=True,
        )
        await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    args = parser.parse_args()
    uvloop.run(main(args.model, args.step_ms / 1e3))
