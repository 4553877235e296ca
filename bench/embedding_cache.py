"""What the embedding cache is worth when pictures come again: the same load with and without it.

    python -m bench.embedding_cache --model DIR [--topology agg] [--rounds 5] [--requests 60] [--concurrency 8]

Both deployments run side by side, and every round sends them the same requests, alternating which comes first. Four
pictures of five (`--reuse`) are of a pool of 20, the others new. The question comes before the picture, so that the
prefix cache, which is on, has nothing to do with it. Without the cache vLLM's own encoder cache still is there.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import uvloop
from PIL import Image

from bench import deployment, load, sse_client
from bench.deployment import MODEL, Deployment
from bench.spread import spread

CPU_FLAGS = (
    "--dtype float32 --max-model-len 2048 --max-num-seqs 64 --max-num-batched-tokens 2048 --enforce-eager "
    "--skip-mm-profiling --block-size 32 --kv-cache-memory-bytes 268435456 "
    """--limit-mm-per-prompt '{"image":1,"video":0}'"""
)
#: Keeps nothing, and counts what the encoder does.
COUNTING = (
    '{"ec_connector":"TrivetECConnector","ec_connector_module_path":"workers.ec_connector","ec_role":"ec_both",'
    '"ec_connector_extra_config":{"capacity_gb":0}}'
)
ENCODED = "trivet:ec_encoded_items_total"
POOL = 20


@dataclass
class Samples:
    """One entry a round."""

    encodes: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


class Pictures:
    """Noise, which compresses badly and so is as large as a photo. The same numbers give the same pictures."""

    def __init__(self, side: int) -> None:
        self._side = side

    def url(self, number: int) -> str:
        low = np.random.RandomState(number).randint(0, 256, (self._side // 8, self._side // 8, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(low).resize((self._side, self._side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
        return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def numbers(requests: int, reuse: float, seed: int) -> Iterator[int]:
    """Pictures by number: below POOL they come again, the others are new in every round."""
    rng = random.Random(seed)
    for at in range(requests):
        yield rng.randrange(POOL) if rng.random() < reuse else POOL + seed * requests + at


async def one_round(
    where: Deployment, pool: sse_client.Pool, urls: list[str], shape: load.Shape, round_: int
) -> tuple[float, load.Result]:
    async def request(number: int, tokens: int, first_token: Callable[[], None]) -> None:
        content = [
            {"type": "text", "text": f"Question {round_} {number}: what is in this image?"},
            {"type": "image_url", "image_url": {"url": urls[number]}},
        ]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
        await pool.chat(body | {"temperature": 0.0, "ignore_eos": True, "stream": True}, first_token)

    before = where.counter(ENCODED)
    result = await load.run(request, shape)
    return (where.counter(ENCODED) - before) / shape.requests, result


async def measure(deployments: dict[str, Deployment], args: argparse.Namespace) -> dict[str, Samples]:
    shape = load.Shape(args.requests, args.concurrency, args.output_tokens, 0.5)
    pictures = Pictures(args.side)
    pools = {name: sse_client.Pool("127.0.0.1", one.port) for name, one in deployments.items()}
    samples = {name: Samples() for name in deployments}
    for round_ in range(args.rounds + 1):
        urls = [pictures.url(number) for number in numbers(args.requests, args.reuse, round_)]
        for name in sorted(deployments, reverse=bool(round_ % 2)):
            encodes, result = await one_round(deployments[name], pools[name], urls, shape, round_)
            if round_:  # the first one warms up, and fills the cache with the pool
                samples[name].encodes.append(encodes)
                samples[name].first_token_ms.append(result.first_token_p50 * 1e3)
                samples[name].tokens_per_s.append(result.tokens_per_s)
    for pool in pools.values():
        pool.close()
    return samples


def table(on: Samples, off: Samples) -> str:
    rows = [
        ("encodes a request", on.encodes, off.encodes, 2),
        ("TTFT p50 ms", on.first_token_ms, off.first_token_ms, 1),
    ]
    rows.append(("tokens/s", on.tokens_per_s, off.tokens_per_s, 0))
    lines = ["| | with the cache | without | ratio |", "| --- | --- | --- | --- |"]
    for title, with_, without, digits in rows:
        ratios = [a / b for a, b in zip(with_, without, strict=True)]
        lines.append(f"| {title} | {spread(with_, digits)} | {spread(without, digits)} | {spread(ratios, 2)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--topology", default="agg")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--side", type=int, default=512, help="of a picture, in pixels")
    parser.add_argument("--reuse", type=float, default=0.8)
    parser.add_argument("--engine-args", default=CPU_FLAGS)
    args = parser.parse_args()
    flags = shlex.split(args.engine_args)
    kept = ["--multimodal-embedding-cache-capacity-gb", "1", *flags]
    none = ["--multimodal-embedding-cache-capacity-gb", "0", "--ec-transfer-config", COUNTING, *flags]
    with ExitStack() as stack:
        deployments = {
            name: stack.enter_context(deployment.running(name, args.topology, args.model, given))
            for name, given in (("on", kept), ("off", none))
        }
        samples = uvloop.run(measure(deployments, args))
    print(table(samples["on"], samples["off"]))


if __name__ == "__main__":
    main()
