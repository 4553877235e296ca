"""What a second and a third encode worker are worth when pictures are large: requests/s, beside vLLM's own server.

    python -m bench.encode_workers --model DIR [--rounds 5] [--requests 24] [--concurrency 8] [--side 3200]

Decoding a picture of ten megapixels and making it fit for the model takes longer than the model does. One deployment,
E/PD with three encode workers, of which some are paused in turn, and vLLM's server as it comes, side by side; every
round gives each the same number of pictures, alternating which comes first. No picture comes twice.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count, islice

import psutil
import uvloop

from app import ports
from app.roles import Role
from bench import deployment, load, processes, sse_client
from bench.deployment import MODEL
from bench.embedding_cache import CPU_FLAGS, Pictures
from bench.spread import spread

MOST = 3
VLLM = "vLLM's server"
#: A paused worker is gone from the registry after `worker.lease_s`, and there again with its next heartbeat.
LEASE_S = 4.0
CHANGE_S = 30.0
#: The API looks at the fleet once a second.
SETTLE_S = 2.0


@contextmanager
def vllm_server(model: str, flags: list[str]) -> Iterator[tuple[int, Callable[[], None]]]:
    """Its port, and what waits until it serves."""
    port = ports.reserve()
    given = ["--model", model, "--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1"]
    with processes.running({"HF_HUB_OFFLINE": "1"}) as started:
        started.python("vllm", "-m vllm.entrypoints.openai.api_server", *given, *flags)
        yield port, lambda: started.wait_ready(f"http://127.0.0.1:{port}/health", 900)


class Encoders:
    """The encode workers of a deployment. `only` leaves some of them running."""

    def __init__(self, where: deployment.Deployment) -> None:
        self._redis_url = where.redis_url
        self._all = self._registered()
        if len(self._all) != MOST:
            raise RuntimeError(f"{len(self._all)} encode workers, not {MOST}")

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        paused = [one for pid in list(self._all.values())[number:] for one in _tree(pid)]
        if not paused:
            yield
            return
        for process in paused:
            process.suspend()
        try:
            self._wait(number)
            yield
        finally:
            for process in paused:
                process.resume()
            self._wait(MOST)

    def _registered(self) -> dict[str, int]:
        """Process ids by the workers' names."""
        records = deployment.workers(self._redis_url)
        return {one.id: one.pid for one in records if one.roles == frozenset({Role.ENCODE})}

    def _wait(self, number: int) -> None:
        until = time.monotonic() + CHANGE_S
        while len(self._registered()) != number:
            if time.monotonic() > until:
                raise RuntimeError(f"{len(self._registered())} encode workers after {CHANGE_S:g} s, not {number}")
            time.sleep(0.1)
        time.sleep(SETTLE_S)


def _tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


class Bench:
    def __init__(self, encoders: Encoders, trivet: int, vllm: int, args: argparse.Namespace) -> None:
        self._encoders = encoders
        self._ports = {"trivet": trivet, "vllm": vllm}
        self._args = args
        self._pictures = Pictures(args.side)
        self._numbers = count()

    def requests_per_s(self, port: int) -> float:
        with ThreadPoolExecutor() as threads:
            urls = list(threads.map(self._pictures.url, islice(self._numbers, self._args.requests)))
        result = uvloop.run(self._load(port, urls))
        return len(urls) / result.wall

    async def _load(self, port: int, urls: list[str]) -> load.Result:
        pool = sse_client.Pool("127.0.0.1", port)

        async def request(number: int, tokens: int, first_token: Callable[[], None]) -> None:
            content = [
                {"type": "image_url", "image_url": {"url": urls[number]}},
                {"type": "text", "text": "What is in this image?"},
            ]
            body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
            await pool.chat(body | {"temperature": 0.0, "stream": True}, first_token)

        try:
            return await load.run(request, load.Shape(len(urls), self._args.concurrency, 1, 0.0))
        finally:
            pool.close()

    def measure(self, name: str) -> float:
        if name == VLLM:
            return self.requests_per_s(self._ports["vllm"])
        with self._encoders.only(int(name)):
            return self.requests_per_s(self._ports["trivet"])

    def run(self) -> dict[str, list[float]]:
        names = [*map(str, range(1, MOST + 1)), VLLM]
        found: dict[str, list[float]] = {name: [] for name in names}
        for round_ in range(self._args.rounds + 1):
            for name in sorted(names, reverse=bool(round_ % 2)):
                value = self.measure(name)
                if round_:  # the first one warms up
                    found[name].append(value)
        return found


def table(found: dict[str, list[float]]) -> str:
    lines = ["| encode workers | requests/s | / one encode worker | / vLLM's server |", "| --- | --- | --- | --- |"]
    for name, values in found.items():
        ratios = [[a / b for a, b in zip(values, found[other], strict=True)] for other in ("1", VLLM)]
        lines.append(f"| {name} | {spread(values, 2)} | {spread(ratios[0], 2)} | {spread(ratios[1], 2)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--side", type=int, default=3200, help="of a picture, in pixels")
    parser.add_argument("--engine-args", default=CPU_FLAGS)
    args = parser.parse_args()
    flags = shlex.split(args.engine_args)
    own = ["--replicas", f"encode={MOST}", "--multimodal-embedding-cache-capacity-gb", "1"]
    os.environ["TRIVET_WORKER__LEASE_S"] = str(LEASE_S)
    with ExitStack() as stack:
        vllm, is_ready = stack.enter_context(vllm_server(args.model, flags))  # starts beside the other
        trivet = stack.enter_context(deployment.running("encoders", "e_pd", args.model, [*own, *flags]))
        is_ready()
        found = Bench(Encoders(trivet), trivet.port, vllm, args).run()
    print(table(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
