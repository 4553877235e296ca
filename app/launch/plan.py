"""Which processes a topology needs, each with its command line and environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.launch.errors import LaunchError
from app.launch.process import ProcessSpec
from app.roles import TOPOLOGIES, Role
from app.settings import ENV_PREFIX, Settings, environment, secrets, variable

DEFAULT_NAME = "default"
#: The folder that holds the packages `app`, `workers` and `api`.
ROOT = Path(__file__).resolve().parents[2]
#: Variables of the prefix that are no settings.
KEPT = ("TRIVET_DEVICE", "TRIVET_HOME")
#: What vLLM takes of a GPU's memory when it has it alone.
GPU_MEMORY_SHARE = 0.9

_PARALLEL = re.compile(r"(?:^| )(?:--(tensor|pipeline)[-_]parallel[-_]size|-(t|p)p)[ =](\d+)")


@dataclass(frozen=True)
class Engine:
    """One worker process: its id in the registry, its roles, and the GPUs that it has (none: the CPU)."""

    id: str
    kind: str
    roles: frozenset[Role]
    gpus: tuple[str, ...]
    #: Engines that use these GPUs, this one included.
    sharers: int = 1


def replicas(topology: str, given: str | None) -> dict[str, int]:
    """`prefill=2,decode=1`, or a number where the topology has one kind of worker. Kinds not named get one worker."""
    kinds = list(TOPOLOGIES[topology])
    counts = dict.fromkeys(kinds, 1)
    for part in (given or "").split(","):
        kind, separator, count = part.strip().rpartition("=")
        if not part.strip():
            continue
        if not separator and len(kinds) == 1:
            kind = kinds[0]
        if kind not in counts or not count.isdigit() or int(count) < 1:
            example = ",".join(f"{one}=2" for one in kinds)
            raise LaunchError(f"--replicas {given}: write it like {example}, with the kinds of topology {topology}")
        counts[kind] = int(count)
    return counts


def engines(
    settings: Settings, topology: str, counts: Mapping[str, int], gpus: Sequence[str], name: str
) -> list[Engine]:
    """The topology's workers, over the GPUs in turn. Their ids are the same at each start, and no two are equal."""
    dropped = frozenset[Role]() if settings.enable_multimodal else frozenset({Role.ENCODE})
    if any(roles == dropped for roles in TOPOLOGIES[topology].values()):
        raise LaunchError(
            f"topology {topology} has workers that only encode, and nothing to encode without --enable-multimodal"
        )
    taken: list[tuple[str, frozenset[Role], tuple[str, ...]]] = []
    at = 0
    for kind, roles in TOPOLOGIES[topology].items():
        width = _gpus_of_an_engine(settings, roles)
        if gpus and width > len(gpus):
            raise LaunchError(
                f"an engine of kind {kind} needs {width} GPUs and there are {len(gpus)} ({', '.join(gpus)})"
            )
        for _ in range(counts[kind]):
            own = tuple(gpus[(at + offset) % len(gpus)] for offset in range(width)) if gpus else ()
            at += width
            taken.append((kind, roles - dropped, own))
    return _named(taken, "" if name == DEFAULT_NAME else f"{name}-")


def _named(taken: list[tuple[str, frozenset[Role], tuple[str, ...]]], prefix: str) -> list[Engine]:
    made: list[Engine] = []
    for kind, roles, own in taken:
        if own:
            place = f"{kind}@{prefix}gpu{'-'.join(own)}"
            again = sum(one.id.partition(".")[0] == place for one in made)
            worker_id = f"{place}.{again + 1}" if again else place
        else:
            worker_id = f"{kind}@{prefix}cpu{sum(one.kind == kind for one in made)}"
        sharers = sum(bool(set(own) & set(other)) for _, _, other in taken) if own else 1
        made.append(Engine(worker_id, kind, roles, own, sharers))
    return made


def _gpus_of_an_engine(settings: Settings, roles: frozenset[Role]) -> int:
    """Tensor times pipeline parallel size, by vLLM's flags; of equal flags the last one counts, as in vLLM."""
    engine = settings.engine
    given = {Role.ENCODE: engine.encode_args, Role.PREFILL: engine.prefill_args, Role.DECODE: engine.decode_args}
    sizes = {"t": 1, "p": 1}
    for text in (engine.args, *(given[role] for role in Role if role in roles)):
        for long, short, size in _PARALLEL.findall(text):
            sizes[(long or short)[0]] = int(size)
    return sizes["t"] * sizes["p"]


def child_environment(settings: Settings, sockets: Path) -> dict[str, str]:
    """This process's environment with exactly these settings, less the API's keys.

    `sockets` is where vLLM puts its socket files.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX) or name in KEPT}
    # The working directory stays the user's, so that relative paths in vLLM's flags hold; but a folder `app` in it
    # must not be taken for ours.
    path = [str(ROOT), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return (
        kept
        | environment(settings, everything=True)
        | {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            "VLLM_RPC_BASE_PATH": str(sockets),
        }
    )


def worker(engine: Engine, settings: Settings, shared: Mapping[str, str], count: int, logs: Path) -> ProcessSpec:
    """One engine's process; `count` engines share this host."""
    own = {
        variable("worker.roles"): ",".join(sorted(engine.roles)),
        variable("engine.per_host"): str(count),
    }
    if engine.gpus:
        own[variable("worker.gpu")] = ",".join(engine.gpus)
    if engine.sharers > 1:
        # First, so that the user's own flag wins.
        share = f"--gpu-memory-utilization {GPU_MEMORY_SHARE / engine.sharers:.3f}"
        own[variable("engine.args")] = f"{share} {settings.engine.args}".strip()
    argv = [
        *_celery(),
        "worker",
        "-n",
        engine.id,
        "--loglevel",
        settings.log_level,
        "--without-gossip",
        "--without-mingle",
    ]
    return ProcessSpec(engine.id, tuple(argv), {**shared, **own}, logs / f"{engine.id}.log")


def api(settings: Settings, shared: Mapping[str, str], logs: Path, metrics: Path) -> ProcessSpec:
    """All processes of the API. Several share their metrics in the folder `metrics`, which must be there."""
    argv = (sys.executable, "-m", "uvicorn", "--app-dir", str(ROOT), "api.main:app")
    listen = ("--http", "api.http_protocol:BoundedHttp", "--host", settings.api.host, "--port", str(settings.api.port))
    manners: tuple[str, ...] = ("--no-access-log", "--timeout-graceful-shutdown", "5")
    manners += ("--log-level", settings.log_level.lower())
    own = {**shared, **secrets(settings)}
    if settings.api.workers > 1:
        # One that loads a tokenizer may not answer its parent for a while.
        manners += ("--workers", str(settings.api.workers), "--timeout-worker-healthcheck", "60")
        own["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    return ProcessSpec("api", argv + listen + manners, own, logs / "api.log")


def flower(settings: Settings, shared: Mapping[str, str], logs: Path) -> ProcessSpec:
    options = (
        f"--address={settings.flower.host}",
        f"--port={settings.flower.port}",
        "--max-tasks=10000",  # Flower's default of 100 000 is 450 MB
        "--purge-offline-workers=60",
    )
    return ProcessSpec("flower", (*_celery(), "flower", *options), shared, logs / "flower.log")


def _celery() -> tuple[str, ...]:
    return (sys.executable, "-m", "celery", "-A", "app.celery")
