"""What a front end costs for each streamed token, and what it bears: ours beside others, over engines without a model.

    python -m bench.front_ends --model DIR [--vllm-router COMMAND] [--dynamo PYTHON] [--step-ms 50]

`--streams` chat completions are in flight, each of which gets a token a step. All front ends are there all the time; in
every round each gets the same requests, and each round begins with another one. Engines are processes of their own,
but for vLLM's (see vllm_front_end.py). CPU time is that of the front end's process alone.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import psutil
import uvloop

from app import ports
from bench import api_alone, load, processes, sse_client
from bench.deployment import MODEL
from bench.overhead import WORDS
from bench.processes import cpu_s
from bench.spread import spread

OURS = "Trivet"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class FrontEnd:
    port: int
    process: psutil.Process


@dataclass
class Samples:
    """One entry a round."""

    token_us: list[float] = field(default_factory=list)
    request_ms: list[float] = field(default_factory=list)
    requests_per_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)


@contextmanager
def trivet(args: argparse.Namespace) -> Iterator[FrontEnd]:
    with api_alone.running(args.model, step_ms=args.step_ms) as alone:
        yield FrontEnd(alone.port, alone.api)


@contextmanager
def vllm(args: argparse.Namespace) -> Iterator[FrontEnd]:
    port = ports.reserve()
    with processes.running({}) as started:
        options = ["--model", args.model, "--port", str(port), "--step-ms", str(args.step_ms)]
        process = started.python("vllm", "-m bench.vllm_front_end", *options)
        started.wait_ready(f"http://{HOST}:{port}/v1/models")
        yield FrontEnd(port, process)


@contextmanager
def vllm_router(args: argparse.Namespace) -> Iterator[FrontEnd]:
    port, behind, metrics = ports.reserve(), ports.reserve(), ports.reserve()
    with processes.running({}) as started:
        started.python("engine", f"-m bench.sse_engine --port {behind} --step-ms {args.step_ms}")
        started.wait_ready(f"http://{HOST}:{behind}/health")
        options = f"--host {HOST} --port {port} --worker-urls http://{HOST}:{behind} --policy round_robin"
        quiet = f"--log-level error --prometheus-port {metrics}"
        process = started.start("router", [*args.vllm_router.split(), *options.split(), *quiet.split()])
        started.wait_ready(f"http://{HOST}:{port}/v1/models")
        yield FrontEnd(port, process)


@contextmanager
def dynamo(args: argparse.Namespace, engine: list[str]) -> Iterator[FrontEnd]:
    port = ports.reserve()
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as found:
        environment = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": found, "DYN_LOG": "warn"}
        with processes.running(environment) as started:
            started.start("engine", [args.dynamo, "-m", *engine])
            front = ["-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port)]
            process = started.start("front", [args.dynamo, *front])
            _wait_answers(port)
            yield FrontEnd(port, process)


def mocker(args: argparse.Namespace, folder: Path) -> list[str]:
    """Dynamo's own engine without a model, with a step that always takes as long."""
    path = folder / "pace.npz"
    times = {"prefill_isl": np.array([1.0, 4096.0]), "prefill_ttft_ms": np.array([1.0, 1.0])}
    grid = {"decode_active_kv_tokens": np.array([1.0, 1e6]), "decode_context_length": np.array([1.0, 4096.0])}
    np.savez(path, **times, **grid, decode_itl=np.full((2, 2), args.step_ms))
    options = ["--model-path", args.model, "--model-name", MODEL, "--planner-profile-data", str(path)]
    return ["dynamo.mocker", *options, "--max-num-seqs", str(2 * args.streams), "--num-gpu-blocks-override", "65536"]


def body(text: str, tokens: int) -> dict[str, object]:
    message = {"role": "user", "content": text}
    return {"model": MODEL, "messages": [message], "max_tokens": tokens, "temperature": 0.0, "stream": True}


def _wait_answers(port: int, limit_s: float = 120.0) -> None:
    """Until a request is answered: a model is there some time after its front end is."""
    until = time.monotonic() + limit_s
    while True:
        try:
            return check(port, 1)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def check(port: int, tokens: int) -> None:
    """Raise ValueError if an answer has not as many tokens as were asked for."""
    asked = body("what is in this image", tokens) | {"stream_options": {"include_usage": True}}
    url, head = f"http://{HOST}:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(asked).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    usage = [found for line in lines if (found := json.loads(line).get("usage"))]
    if not usage or usage[-1]["completion_tokens"] != tokens:
        raise ValueError(f"{tokens} tokens were asked for, and the answer is {lines[-3:]}")


class Bench:
    def __init__(self, front_ends: dict[str, FrontEnd], args: argparse.Namespace) -> None:
        self._front_ends = front_ends
        self._pools = {name: sse_client.Pool(HOST, one.port) for name, one in front_ends.items()}
        rng = Random(7)
        self._texts = [" ".join(rng.choices(WORDS, k=args.prompt_tokens)) for _ in range(64)]
        self._shape = load.Shape(args.requests, args.streams, args.output_tokens, args.spread)
        self._rounds = args.rounds

    async def run(self) -> dict[str, Samples]:
        names = list(self._front_ends)
        samples = {name: Samples() for name in names}
        for round_ in range(-1, self._rounds):
            at = round_ % len(names)
            for name in names[at:] + names[:at]:
                await self._measure(name, samples[name] if round_ >= 0 else Samples())  # the first one warms up
        for pool in self._pools.values():
            pool.close()
        return samples

    async def _measure(self, name: str, samples: Samples) -> None:
        pool, process = self._pools[name], self._front_ends[name].process

        async def request(number: int, tokens: int, first_token: Callable[[], None]) -> None:
            await pool.chat(body(self._texts[number % len(self._texts)], tokens), first_token)

        before, events = cpu_s(process), pool.events
        result = await load.run(request, self._shape)
        used = cpu_s(process) - before
        samples.token_us.append(used / result.tokens * 1e6)
        samples.request_ms.append(used / self._shape.requests * 1e3)
        samples.requests_per_s.append(self._shape.requests / result.wall)
        samples.tokens_per_s.append(result.tokens_per_s)
        samples.events.append((pool.events - events) / result.tokens)
        samples.first_token_ms.append(result.first_token_p50 * 1e3 if result.first_token else math.nan)


def table(found: dict[str, Samples]) -> str:
    columns = "CPU us/token | CPU / ours | CPU ms/request | requests/s | requests/s / ours | tokens/s | events/token"
    lines = [f"| front end | {columns} | TTFT p50 ms |", "| --- " * 9 + "|"]
    ours = found[OURS]
    for name, s in found.items():
        cost = [a / b for a, b in zip(s.token_us, ours.token_us, strict=True)]
        speed = [a / b for a, b in zip(s.requests_per_s, ours.requests_per_s, strict=True)]
        values = (s.token_us, cost, s.request_ms, s.requests_per_s, speed, s.tokens_per_s, s.events, s.first_token_ms)
        digits = (1, 2, 2, 1, 2, 0, 2, 0)
        lines.append(f"| {name} | " + " | ".join(map(spread, values, digits)) + " |")
    return "\n".join(lines)


def chosen(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], AbstractContextManager[FrontEnd]]]:
    starts: dict[str, Callable[[], AbstractContextManager[FrontEnd]]] = {
        OURS: partial(trivet, args),
        "vLLM's server": partial(vllm, args),
    }
    if args.vllm_router:
        starts["vllm-router"] = partial(vllm_router, args)
    if args.dynamo:
        engine = ["bench.dynamo_engine", "--model", args.model, "--step-ms", str(args.step_ms)]
        starts["Dynamo"] = partial(dynamo, args, engine)
        starts["Dynamo, its mocker"] = partial(dynamo, args, mocker(args, folder))
    return starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm-router", help="the command that starts it")
    parser.add_argument("--dynamo", help="the Python of an environment with ai-dynamo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=256, help="requests in flight")
    parser.add_argument("--requests", type=int, default=256, help="a round")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.25, help="lengths of answers differ by up to this part")
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trivet-bench-")))
        front_ends = {name: stack.enter_context(start()) for name, start in chosen(args, folder).items()}
        for name, one in front_ends.items():
            print(f"{name} answers on port {one.port}", flush=True)
            check(one.port, 8)
        found = uvloop.run(Bench(front_ends, args).run())
    print(table(found))


if __name__ == "__main__":
    main()
