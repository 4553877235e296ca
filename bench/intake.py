"""What media cost the API: large pictures beside text requests, CPU for each picture, hashing.

    python -m bench.intake --model DIR [--rounds 5] [--uploads 100] [--mb 10] [--step-ms 0]

The API's real process, with a worker that answers at once: what workers do with media is not measured here. With
`--step-ms` a request has its first token at the next step, as from an engine, and the ratio is that of what
clients see; without, it is that of the API's own share.

Text requests beside `--uploads` large pictures that all come at the same time, as data: URLs; CPU time of the API for a
picture of 1 MB, as a data: URL and from a host on loopback, beyond that for a request without one; and the rate of the
hash that names media.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import uvloop

from app import media
from bench import api_alone, sse_client, uploads
from bench.api_alone import Alone
from bench.deployment import MODEL
from bench.processes import cpu_s
from bench.spread import spread
from bench.watch import Watch, watching
from tests.media_server import media_server

#: So that pictures can come from a host on loopback.
SETTINGS = {"TRIVET_MEDIA_URLS__ALLOW_PRIVATE": "127.0.0.0/8", "TRIVET_MEDIA_URLS__ALLOWED_PORTS": "any"}
#: Requests of each kind for one figure of CPU, and hashes for one of the rate.
PICTURES = 40
HASHES = 20

#: Text requests in a second. They come when they come: one that waits makes none of the others wait to be sent.
RATE = 100
IDLE_S = 15.0


@dataclass
class Samples:
    """One entry a round."""

    idle_ms: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    median_ratio: list[float] = field(default_factory=list)
    alive_ms: list[float] = field(default_factory=list)
    grown_mb: list[float] = field(default_factory=list)
    shared_mb: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Texts:
    """`first` are the seconds to the first token of each text request, in order; `refused` had none."""

    first: list[float] = field(default_factory=list)
    refused: int = 0

    def ms(self, part: float) -> float:
        return self.first[min(len(self.first) - 1, int(len(self.first) * part))] * 1e3


async def texts(pool: sse_client.Pool, is_over: Callable[[], bool]) -> Texts:
    """Send them until then."""
    found = Texts()

    async def one(number: int) -> None:
        started = time.perf_counter()
        messages = [{"role": "user", "content": f"Question {number}: what is a red circle?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2, "stream": True}
        try:
            await pool.chat(body, lambda: found.first.append(time.perf_counter() - started))
        except ConnectionError as error:
            print(f"a text request was refused: {error}", file=sys.stderr)
            found.refused += 1

    loop = asyncio.get_running_loop()
    due, number = loop.time(), 0
    async with asyncio.TaskGroup() as group:
        while not is_over():
            group.create_task(one(number))
            due, number = due + 1 / RATE, number + 1
            await asyncio.sleep(max(0.0, due - loop.time()))
    found.first.sort()
    return found


async def busy(alone: Alone, pool: sse_client.Pool, args: argparse.Namespace) -> tuple[Texts, Watch, float]:
    """Text requests while the pictures are taken, what was seen meanwhile, and the seconds that the pictures took."""
    command = f"-m bench.uploads --port {alone.port} --number {args.uploads} --mb {args.mb}".split()
    with watching(alone.api, alone.port) as watch:
        child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        try:
            beside = await texts(pool, lambda: child.returncode is not None)
            assert child.stdout is not None
            found = json.loads(await child.stdout.read())
        finally:
            if child.returncode is None:
                child.kill()
    if found["statuses"] != {"200": args.uploads}:
        raise RuntimeError(f"not all pictures were taken: {found}")
    return beside, watch, found["seconds"]


async def beside_text(alone: Alone, args: argparse.Namespace) -> Samples:
    samples, pool = Samples(), sse_client.Pool("127.0.0.1", alone.port)

    async def idle() -> Texts:
        until = time.monotonic() + IDLE_S
        return await texts(pool, lambda: time.monotonic() > until)

    for number in range(-1, args.rounds):
        if number % 2:
            (loaded, watch, seconds), quiet = await busy(alone, pool, args), await idle()
        else:
            quiet, (loaded, watch, seconds) = await idle(), await busy(alone, pool, args)
        if number < 0:  # warms up
            continue
        samples.idle_ms.append(quiet.ms(0.99))
        samples.busy_ms.append(loaded.ms(0.99))
        samples.ratio.append(loaded.ms(0.99) / quiet.ms(0.99))
        samples.median_ratio.append(loaded.ms(0.5) / quiet.ms(0.5))
        samples.refused.append(loaded.refused + quiet.refused)
        samples.alive_ms.append(max(watch.alive_s) * 1e3)
        samples.grown_mb.append(watch.grown / 1e6)
        samples.shared_mb.append(max(watch.shared) / 1e6)
        samples.seconds.append(seconds)
    pool.close()
    return samples


@dataclass
class Costs:
    """One entry a round: milliseconds of CPU in the API beyond a request without a picture, GB/s of one core."""

    data_url_ms: list[float] = field(default_factory=list)
    http_ms: list[float] = field(default_factory=list)
    blake3: list[float] = field(default_factory=list)
    sha256: list[float] = field(default_factory=list)


def cpu_costs(alone: Alone, rounds: int) -> Costs:
    costs, picture = Costs(), uploads.Picture(1_000_000)
    with media_server() as host:

        def at_host() -> list[bytes]:
            return [host.put(f"/{len(host.files)}.png", picture.copy(), "image/png").encode()]

        urls: dict[str, Callable[[], list[bytes] | None]] = {"none": lambda: None, "data": picture.url, "http": at_host}
        for number in range(-1, rounds):
            names = sorted(urls, reverse=bool(number % 2))
            took = {name: cpu_of(alone, [uploads.body(urls[name]()) for _ in range(PICTURES)]) for name in names}
            if number >= 0:  # the first round warms up
                costs.data_url_ms.append((took["data"] - took["none"]) * 1e3)
                costs.http_ms.append((took["http"] - took["none"]) * 1e3)
    data = os.urandom(10_000_000)
    for _ in range(rounds):
        costs.blake3.append(rate(lambda: media.identify(data, modality="image", model="m"), data))
        costs.sha256.append(rate(lambda: hashlib.sha256(data).digest(), data))
    return costs


def cpu_of(alone: Alone, bodies: list[list[bytes]]) -> float:
    """CPU seconds of the API for each request, one after the other."""
    before = cpu_s(alone.api)
    for one in bodies:
        status, answer = uploads.post(alone.port, one)
        if status != 200:
            raise RuntimeError(f"{status}: {answer[:300]!r}")
    return (cpu_s(alone.api) - before) / len(bodies)


def rate(work: Callable[[], object], data: bytes) -> float:
    """GB/s, in CPU time of this thread: the work is done by it alone."""
    before = time.thread_time()
    for _ in range(HASHES):
        work()
    return len(data) * HASHES / (time.thread_time() - before) / 1e9


def table(named: dict[str, tuple[list[float], int]]) -> str:
    return "\n".join(f"| {name} | {spread(values, digits)} |" for name, (values, digits) in named.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--uploads", type=int, default=100)
    parser.add_argument("--mb", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=0.0, help="of the worker; 0: it answers at once")
    args = parser.parse_args()
    with api_alone.running(args.model, SETTINGS, args.step_ms) as alone:
        costs = cpu_costs(alone, args.rounds)
        s = uvloop.run(beside_text(alone, args))
    rows = {
        "TTFT p99 of text requests, idle, ms": (s.idle_ms, 1),
        "TTFT p99 of text requests beside the pictures, ms": (s.busy_ms, 1),
        "ratio": (s.ratio, 2),
        "ratio of TTFT p50": (s.median_ratio, 2),
        "text requests refused": (s.refused, 0),
        "longest `/health/live`, ms": (s.alive_ms, 0),
        "memory of the API's own, beyond that at the start, MB": (s.grown_mb, 0),
        "media in shared memory, MB": (s.shared_mb, 0),
        "until all pictures were answered, s": (s.seconds, 1),
        "CPU for a data: URL of 1 MB, ms": (costs.data_url_ms, 1),
        "CPU for an http: URL of 1 MB, ms": (costs.http_ms, 1),
        "BLAKE3, GB/s": (costs.blake3, 2),
        "SHA-256, GB/s": (costs.sha256, 2),
    }
    print("| | |", "| --- | --- |", table(rows), sep="\n")


if __name__ == "__main__":
    main()
