"""python -m bench.simulation: the router against round robin, and against one that sees text alone."""

from __future__ import annotations

import argparse
import asyncio
import sys
from concurrent.futures import ProcessPoolExecutor
from statistics import mean, quantiles
from typing import Any

from app.redis import connect
from app.settings_sections import RoutingSettings
from bench.simulation.cluster import Cluster, Outcome, Sight
from bench.simulation.engine import Costs
from bench.simulation.traffic import Traffic, Workload
from bench.spread import spread
from tests.redis_server import redis_server

#: Time is simulated, so a decision has all the time that this machine needs.
PATIENT = 60.0

ROUTERS: dict[str, tuple[RoutingSettings, Sight]] = {
    "round robin": (RoutingSettings(policy="round_robin"), "whole"),
    "text prefixes": (RoutingSettings(timeout_s=PATIENT), "text"),
    "kv": (RoutingSettings(timeout_s=PATIENT), "whole"),
}


def figures(outcome: Outcome) -> dict[str, float]:
    cuts = quantiles(outcome.ttft, n=100)
    return {
        "requests/s": outcome.requests / outcome.seconds,
        "TTFT p50 ms": 1000 * cuts[49],
        "TTFT p99 ms": 1000 * cuts[98],
        "cached %": 100 * outcome.cached_tokens / outcome.prompt_tokens,
        "encodes": float(outcome.encodes),
        "busiest / mean": max(outcome.loads) / mean(outcome.loads),
    }


async def simulate(url: str, name: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    settings, sight = ROUTERS[name]
    redis: Any = connect(url, PATIENT, name="simulation")
    try:
        await redis.flushall()
        cluster = Cluster(redis, args.workers, Costs(), settings, sight)
        traffic = Traffic(Workload(sessions=args.sessions), seed)
        found = figures(await cluster.run(traffic, args.warm_up, args.requests))
        print(f"round {seed}, {name}: {found}", file=sys.stderr, flush=True)
        return found
    finally:
        await redis.aclose()


def one_round(args: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """All routers, with the same conversations."""
    with redis_server() as server:
        return {name: asyncio.run(simulate(server.url, name, args, seed)) for name in ROUTERS}


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    names = list(next(iter(rounds[0].values())))
    lines = ["| router | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for router in ROUTERS:
        cells = [spread([one[router][name] for one in rounds], 2 if "mean" in name else 1) for name in names]
        lines.append(f"| {router} | " + " | ".join(cells) + " |")
    for other in ("round robin", "text prefixes"):
        ratios = [
            spread([one["kv"][name] / one[other][name] for one in rounds], 2)
            for name in ("requests/s", "TTFT p50 ms", "TTFT p99 ms")
        ]
        lines.append(f"| kv / {other} | " + " | ".join(ratios) + " | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=Workload.sessions, help="conversations at a time")
    parser.add_argument("--warm-up", type=int, default=1000, help="requests before the measured ones")
    parser.add_argument("--requests", type=int, default=3000, help="measured requests of each router and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="rounds at a time, each in a process of its own")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.at_once) as pool:
        rounds = list(pool.map(one_round, [args] * args.rounds, range(args.rounds)))
    print(table(rounds))


if __name__ == "__main__":
    main()
