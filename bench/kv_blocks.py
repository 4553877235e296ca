"""What naming KV blocks costs: CPU to name a prompt's, memory in Redis to keep an engine's.

    python -m bench.kv_blocks [--tokens 100000] [--blocks 1000000] [--rounds 7]

Times are CPU time of the process, so that other work on the machine counts little. Memory is what the server uses more
than before, with the names of all blocks in one set, as a worker writes them (`app.routing.affinity`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from app.redis import connect
from app.routing.affinity import HeldBlocks
from app.routing.blocks import Span, chain
from bench.spread import spread
from tests.redis_server import redis_server

BLOCK_SIZES = (16, 32, 128)
KEY = "bench:kv"
#: Tokens of a picture, and how many of them lie in a prompt.
PICTURE, PICTURES = 1000, 10


def prompt(tokens: int) -> tuple[list[int], list[Span]]:
    chance = random.Random(0)
    ids = [chance.randrange(150_000) for _ in range(tokens)]
    step = tokens // PICTURES
    return ids, [Span(f"{number:032x}", number * step, min(PICTURE, step)) for number in range(PICTURES)]


def naming(tokens: int, rounds: int) -> None:
    print(f"| block size | blocks | ms for {tokens} tokens | with {PICTURES} pictures |\n| --- | --- | --- | --- |")
    ids, pictures = prompt(tokens)
    for size in BLOCK_SIZES:
        times = {len(items): [_ms(ids, size, items) for _ in range(rounds)] for items in ([], pictures)}
        print(f"| {size} | {tokens // size} | {' | '.join(spread(one, 1) for one in times.values())} |")


def _ms(ids: list[int], size: int, items: list[Span]) -> float:
    started = time.process_time()
    chain(ids, size, items=items)
    return 1000 * (time.process_time() - started)


async def keeping(blocks: int) -> None:
    with redis_server() as server:
        async with connect(server.url, 60.0, name="bench") as redis:
            print("\n| blocks | bytes a block | s to write all of them |\n| --- | --- | --- |")
            for count in (blocks // 100, blocks // 10, blocks):
                await redis.flushall()
                before = await _used(redis)
                held = HeldBlocks(redis, KEY, lease_s=600.0, renew_s=60.0, most=blocks)
                held.add([f"{random.getrandbits(64):016x}" for _ in range(count)])
                started = time.perf_counter()
                await held.write()
                took = time.perf_counter() - started
                print(f"| {count} | {(await _used(redis) - before) / count:.0f} | {took:.2f} |")


async def _used(redis: Any) -> int:
    return int((await redis.info("memory"))["used_memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    naming(arguments.tokens, arguments.rounds)
    asyncio.run(keeping(arguments.blocks))


if __name__ == "__main__":
    main()
