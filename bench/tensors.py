"""One embedding from the process that holds it to another one: by its file, by NIXL, by Redis.

    python -m bench.tensors [--mib 16] [--rounds 20]

Every round moves a new buffer in each way, in turn, from one process into a file in the shared memory of another, as
an encode worker's embedding gets to a prefill worker. By file and NIXL the holder's part, `publish`, is timed too; by
Redis both sides are SET and GET, and the file that the answer is written to.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis

from app.messages.tensors import Descriptor
from app.settings_sections import TensorSettings
from app.tensors import folder, segment
from app.tensors.plane import TensorPlane
from app.tensors.segment import Header
from bench.spread import spread
from tests.redis_server import redis_server

WAYS = ("file", "nixl", "redis")
KEY = "bench:embedding"


def header(nbytes: int) -> Header:
    return Header("embedding", segment.new_nonce(), "bfloat16", (nbytes // 4096, 2048), nbytes)


def hold(commands: Connection, nbytes: int, url: str) -> None:
    """The holder's process: makes a new buffer for each command and offers it in the way that was asked for."""
    asyncio.run(_hold(commands, nbytes, url))


async def _hold(commands: Connection, nbytes: int, url: str) -> None:
    client = redis.Redis.from_url(url)
    async with _plane("auto") as (plane, own):
        path = own / "embedding"
        while (way := await asyncio.to_thread(commands.recv)) is not None:
            payload = os.urandom(1 << 16) * (nbytes >> 16)
            path.unlink(missing_ok=True)
            segment.fill(path, header(nbytes), payload)
            started = time.perf_counter()
            descriptor = None
            if way == "redis":
                client.set(KEY, payload)
            else:
                descriptor = (await plane.publish(path, 60.0)).model_dump()
            commands.send((descriptor, time.perf_counter() - started))
            await asyncio.to_thread(commands.recv)  # it has been fetched
            await plane.withdraw(path)
    client.close()


@asynccontextmanager
async def _plane(transport: Any) -> AsyncIterator[tuple[TensorPlane, Path]]:
    settings = TensorSettings(transport=transport)
    own = folder.make_folder(Path(settings.directory), "bench")
    plane = TensorPlane(own.path, settings, 100)
    await plane.start()
    try:
        yield plane, own.path
    finally:
        await plane.close()
        own.remove()


async def measure(commands: Connection, nbytes: int, url: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each way and round (the holder's milliseconds, the reader's)."""
    client = redis.Redis.from_url(url)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    async with _plane("auto") as (near, own), _plane("nixl") as (far, others):
        for round_ in range(-1, rounds):
            for way in WAYS if round_ % 2 else reversed(WAYS):
                commands.send(way)
                described, offered_s = await asyncio.to_thread(commands.recv)
                path = (others if way == "nixl" else own) / f"{way}-{round_}"
                started = time.perf_counter()
                if way == "redis":
                    payload = client.get(KEY)
                    assert isinstance(payload, bytes)
                    segment.fill(path, header(nbytes), payload)
                else:
                    plane = far if way == "nixl" else near
                    await plane.fetch(Descriptor.model_validate(described), path)
                fetched_s = time.perf_counter() - started
                commands.send("done")
                await (far if way == "nixl" else near).withdraw(path)
                path.unlink()
                if round_ >= 0:  # the first round connects and warms up
                    times[way].append((offered_s * 1e3, fetched_s * 1e3))
        assert near.counts.mapped and far.counts.nixl and not near.counts.nixl and not far.counts.mapped
    commands.send(None)
    client.close()
    return times


def table(times: dict[str, list[tuple[float, float]]]) -> str:
    whole = {way: [sum(pair) for pair in pairs] for way, pairs in times.items()}
    lines = ["| way | holder ms | reader ms | both ms | Redis / this |", "| --- | --- | --- | --- | --- |"]
    for way, pairs in times.items():
        ratios = [slow / own for slow, own in zip(whole["redis"], whole[way], strict=True)]
        columns = ([pair[0] for pair in pairs], [pair[1] for pair in pairs], whole[way])
        cells = [spread(column, 2) for column in columns] + [spread(ratios, 1)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    nbytes = args.mib << 20
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with redis_server() as server:
        holder = context.Process(target=hold, args=(theirs, nbytes, server.url))
        holder.start()
        try:
            print(table(asyncio.run(measure(ours, nbytes, server.url, args.rounds))))
        finally:
            holder.join(20)
            holder.kill()


if __name__ == "__main__":
    main()
