"""vLLM's API server over an engine client without an engine: what its front end costs, and what it bears.

    python -m bench.vllm_front_end --model DIR --port N --step-ms 50

Text comes ready from `Engine`: what vLLM's API server spends on detokenizing and on hearing from its engine's process
is left out, to its advantage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import uvicorn
import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.registry import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

from bench.deployment import MODEL
from bench.steps import Steps


class Engine(EngineClient):
    """Answers with as many numbers as were asked for, one a step; those of a reader that is late come together."""

    is_running, is_stopped, errored, dead_error = True, False, False, None

    def __init__(self, config: Any, steps: Steps) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self._steps = steps

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        count = sampling_params.max_tokens
        async for new in self._steps.tokens(count):
            done = new.stop == count
            output = CompletionOutput(
                index=0,
                text="".join(f"{number} " for number in new),
                token_ids=list(new),
                cumulative_logprob=None,
                logprobs=None,
                finish_reason="length" if done else None,
            )
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [output], done)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None: ...

    async def do_log_stats(self) -> None: ...

    async def abort(self, request_id: Any) -> None: ...


def _unused(name: str) -> Any:
    async def method(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(name)

    return method


for _name in Engine.__abstractmethods__:
    setattr(Engine, _name, _unused(_name))
Engine.__abstractmethods__ = frozenset()


async def main(given: SimpleNamespace) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(
        ["--model", given.model, "--served-model-name", MODEL, "--max-model-len", "2048", "--dtype", "float32"]
    )
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    steps = Steps(given.step_ms / 1e3)
    engine = Engine(config, steps)
    app = build_app(args, ("generate",), config.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    options = {"log_level": "warning", "access_log": False, "lifespan": "off", "timeout_keep_alive": 600}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=given.port, **options))
    pace = asyncio.create_task(steps.run())
    await server.serve()
    pace.cancel()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--step-ms", type=float, required=True)
    uvloop.run(main(SimpleNamespace(**vars(options.parse_args()))))
