"""What HTTP + Celery + Redis cost over calling the same engine in process.

    python -m bench.overhead --model DIR [--concurrency 1,16,64] [--rounds 5] [--engine-args "..."]

Every round runs the same load in process and through the API, alternating which comes first, and gives one ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
import redis.asyncio as aioredis
import uvloop

from app import keys
from app.roles import Role
from app.sender import envelope_of
from bench import load, sse_client, stack
from bench.inprocess import TASK
from bench.processes import cpu_s
from bench.spread import spread

#: Words of the tiny model's vocabulary, so that a prompt has about as many tokens as words.
WORDS = [
    "what",
    "is",
    "in",
    "this",
    "image",
    "describe",
    "the",
    "video",
    "in",
    "detail",
    "a",
    "red",
    "circle",
    "a",
    "blue",
    "square",
    "a",
    "green",
    "triangle",
]


@dataclass
class Samples:
    """One entry a round. TTFT in ms, CPU in microseconds a token."""

    ratio: list[float] = field(default_factory=list)
    added_p50: list[float] = field(default_factory=list)
    added_p99: list[float] = field(default_factory=list)
    inprocess: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    api_cpu: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, running: stack.Stack, args: argparse.Namespace, tokenizer: Any) -> None:
        self._stack = running
        self._args = args
        self._redis = aioredis.Redis.from_url(running.redis_url)
        self._pool = sse_client.Pool("127.0.0.1", running.port)
        rng = random.Random(7)
        self._texts = [" ".join(rng.choices(WORDS, k=args.prompt_tokens)) for _ in range(64)]
        self._prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in self._texts
        ]

    async def inprocess(self, shape: load.Shape) -> load.Result:
        answer = f"bench:{uuid.uuid4().hex}"
        params = {"temperature": 0.0, "ignore_eos": True, "output_kind": 1}
        message = {"answer": answer, "prompts": self._prompts, "params": params, "shape": asdict(shape)}
        await self._redis.lpush(
            keys.worker_queue(Role.DECODE, "agg@bench"), envelope_of(TASK, message, "decode.agg@bench", "bench")
        )
        until = time.monotonic() + 600
        while (found := await self._redis.get(answer)) is None:
            if time.monotonic() > until:
                raise TimeoutError("the in-process load did not end within 600 s")
            await asyncio.sleep(0.05)
        return load.Result(**orjson.loads(found))

    async def http(self, shape: load.Shape) -> tuple[load.Result, float]:
        """The result, and the API's CPU seconds."""

        async def request(number: int, tokens: int, first_token: Callable[[], None]) -> None:
            body = {
                "model": "bench",
                "messages": [{"role": "user", "content": self._texts[number % len(self._texts)]}],
                "max_tokens": tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
            }
            await self._pool.chat(body, first_token)

        before = cpu_s(self._stack.api)
        result = await load.run(request, shape)
        return result, cpu_s(self._stack.api) - before

    async def measure(self, concurrency: int) -> Samples:
        samples = Samples()
        requests = max(self._args.requests, concurrency * self._args.waves)
        shape = load.Shape(requests, concurrency, self._args.output_tokens, self._args.spread)
        for number in range(-1, self._args.rounds):
            if number % 2:
                (http, cpu), direct = await self.http(shape), await self.inprocess(shape)
            else:
                direct, (http, cpu) = await self.inprocess(shape), await self.http(shape)
            if number < 0:  # the first round warms both up
                continue
            samples.ratio.append(http.tokens_per_s / direct.tokens_per_s)
            samples.added_p50.append((http.first_token_p50 - direct.first_token_p50) * 1e3)
            samples.added_p99.append((http.first_token_p99 - direct.first_token_p99) * 1e3)
            samples.inprocess.append(direct.tokens_per_s)
            samples.http.append(http.tokens_per_s)
            samples.api_cpu.append(cpu / http.tokens * 1e6)
        return samples

    async def run(self) -> None:
        print(
            "| in flight | tokens/s in process | through HTTP | ratio "
            "| added TTFT p50 ms | added TTFT p99 ms | API CPU us/token |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for concurrency in (int(one) for one in self._args.concurrency.split(",")):
            s = await self.measure(concurrency)
            columns = (s.inprocess, s.http, s.ratio, s.added_p50, s.added_p99, s.api_cpu)
            digits = (0, 0, 2, 1, 1, 0)
            print(
                f"| {concurrency} | " + " | ".join(spread(c, d) for c, d in zip(columns, digits, strict=True)) + " |",
                flush=True,
            )
        self._pool.close()
        await self._redis.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20, help="at least so many a round")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--waves", type=int, default=4, help="requests a round, as a multiple of those in flight")
    parser.add_argument("--spread", type=float, default=0.5, help="lengths of answers differ by up to this part")
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--engine-args", default=stack.CPU_FLAGS)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with stack.running(args.model, args.engine_args, args.api_processes) as running:
        uvloop.run(Bench(running, args, tokenizer).run())


if __name__ == "__main__":
    main()
