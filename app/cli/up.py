"""`trivet up`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import engine_flags, output
from app.roles import TOPOLOGIES

if TYPE_CHECKING:
    from app.launch.state import State, StateDirectory
    from app.launch.supervisor import Order, Supervisor
    from app.launch.view import View
    from app.settings import Settings


def _known(topology: str) -> str:
    if topology not in TOPOLOGIES:
        raise typer.BadParameter(f"{topology!r} is none of {', '.join(TOPOLOGIES)}")
    return topology


Name = Annotated[str, typer.Option(help="Name of this `up`, for running several on one host.")]


def up(
    context: typer.Context,
    topology: Annotated[
        str, typer.Option(callback=_known, help="agg: one kind of worker; pd, e_pd, e_p_d: stages apart.")
    ] = "agg",
    model: Annotated[str | None, typer.Option(help="Local path or hub name.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name that clients use.")] = None,
    enable_multimodal: Annotated[
        bool | None, typer.Option("--enable-multimodal/--no-enable-multimodal", help="Take media from clients.")
    ] = None,
    multimodal_embedding_cache_capacity_gb: Annotated[
        float | None, typer.Option(help="Embeddings that each worker keeps in shared memory, in GB.", min=0)
    ] = None,
    replicas: Annotated[str | None, typer.Option(help="Workers of each kind: prefill=2,decode=1.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to spread workers over, as 0,1,2; all if not given.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the API.")] = None,
    api_port: Annotated[int | None, typer.Option(help="Port of the API.")] = None,
    api_workers: Annotated[int | None, typer.Option(help="Processes of the API, which share its port.")] = None,
    flower_port: Annotated[int | None, typer.Option(help="Port of Flower.")] = None,
    no_flower: Annotated[bool, typer.Option("--no-flower", help="Do without the dashboard.")] = False,
    api_keys_file: Annotated[str | None, typer.Option(help="File with the keys that open the API, one a line.")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="vLLM's parser for the model's tool calls.")] = None,
    enable_auto_tool_choice: Annotated[
        bool | None,
        typer.Option(
            "--enable-auto-tool-choice/--no-enable-auto-tool-choice", help="Let the model choose to call tools."
        ),
    ] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="vLLM's parser for the model's reasoning.")] = None,
    allowed_media_domains: Annotated[
        str | None, typer.Option(help="The only hosts that media are fetched from: example.com,*.example.org.")
    ] = None,
    allowed_local_media_path: Annotated[
        str | None, typer.Option(help="Folder whose files file: URLs may name.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to use; one is started if none answers on loopback.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is ready, and leave it running.")] = False,
    name: Name = "default",
    timeout: Annotated[float | None, typer.Option(help="Seconds until it must be ready.", min=1)] = None,
) -> None:
    """Start Redis if none answers, workers, API and Flower; ready when a request succeeds. Ctrl-C stops it all.

    Every other flag is an engine argument of vLLM's and passes through unchanged: --max-model-len 4096.

    For workers of one role: --prefill.max-num-seqs 8, --decode.max-num-seqs 64.
    """
    from app.launch.state import StateDirectory

    settings = load(context)
    order = _order(settings, topology, replicas, gpus, name, timeout)
    directory = StateDirectory(name)
    start = _detached if detach else _attached
    if not start(settings, order, directory):
        raise typer.Exit(1)


def load(context: typer.Context) -> Settings:
    """Settings with this command line's flags over all other sources."""
    from app import settings

    given = flags(context.params)
    engine = engine_flags.split(context.args)
    if engine:
        # After those of file and environment, and so stronger: vLLM takes the last of equal flags.
        before = settings.load(**given).engine
        given["engine"] = {key: f"{getattr(before, key)} {text}".strip() for key, text in engine.items()}
    return settings.load(**given)


#: Flags that are settings of the same name.
TOP_LEVEL = ("model", "served_model_name", "enable_multimodal", "multimodal_embedding_cache_capacity_gb")


#: Flags that are settings of the same name, of the section `api`.
API = ("host", "api_keys_file", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser")

#: Flags that are settings of the same name, of the section `media_urls`. They are vLLM's, and would have no effect in a
#: worker, which fetches nothing.
MEDIA_URLS = ("allowed_media_domains", "allowed_local_media_path")


def flags(params: dict[str, Any]) -> dict[str, Any]:
    """The settings that the command line gave, as a tree."""
    tree: dict[str, Any] = {key: params[key] for key in TOP_LEVEL}
    tree["api"] = {"port": params["api_port"], "workers": params["api_workers"]} | {key: params[key] for key in API}
    tree["media_urls"] = {key: params[key] for key in MEDIA_URLS}
    tree["flower"] = {"port": params["flower_port"], "enabled": False if params["no_flower"] else None}
    tree["redis"] = {"broker_url": params["redis_url"]}
    return _given(tree)


def _given(tree: dict[str, Any]) -> dict[str, Any]:
    pruned = {key: _given(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: value for key, value in pruned.items() if value is not None and value != {}}


def _order(
    settings: Settings, topology: str, replicas: str | None, gpus: str | None, name: str, timeout: float | None
) -> Order:
    from app import api_keys
    from app.launch import gpus as devices
    from app.launch import plan
    from app.launch.errors import LaunchError
    from app.launch.supervisor import Order

    if not settings.model:
        raise LaunchError("which model? --model PATH_OR_HUB_NAME (TRIVET_MODEL)")
    if settings.model.startswith(("/", ".", "~")) and not Path(settings.model).expanduser().exists():
        raise LaunchError(f"--model {settings.model}: no such file or directory")
    counts = plan.replicas(topology, replicas)
    engines = plan.engines(settings, topology, counts, devices.available(gpus), name)
    warnings = [
        f"{one.sharers} engines share GPU {','.join(one.gpus)}: each gets "
        f"--gpu-memory-utilization {plan.GPU_MEMORY_SHARE / one.sharers:.3f} unless you set it"
        for one in engines
        if one.sharers > 1
    ]
    key = next(iter(api_keys.read(settings.api)), None)
    return Order(topology, engines, timeout or settings.engine.start_timeout_s, tuple(dict.fromkeys(warnings)), key)


class Progress:
    """Shows the states of an `up` as they come: the table, warnings, and once what to do when it is ready."""

    def __init__(self, view: View, stop: str) -> None:
        self._view = view
        self._stop = stop
        self._warned = 0
        self._ready = False

    def __call__(self, state: State) -> None:
        from app.launch import view
        from app.launch.state import Phase

        for text in state.warnings[self._warned :]:
            self._view.line(state, f"warning: {text}")
        self._warned = len(state.warnings)
        self._view.update(state)
        if state.phase is Phase.READY and not self._ready:
            self._ready = True
            self.done(state)
            print(view.ready(state, self._stop), flush=True)

    def done(self, state: State) -> None:
        self._view.to_lines(state)


def _attached(settings: Settings, order: Order, directory: StateDirectory) -> bool:
    import asyncio

    from app.launch import background, view

    with directory.lock():
        background.log_to_file(directory)
        progress = Progress(view.View(output.console()), "Ctrl-C, or " + _down(directory.name))
        supervisor = _supervisor(settings, order, directory, progress)
        ok = asyncio.run(supervisor.run())
        progress.done(supervisor.state)
    return _report(supervisor.state, ok)


def _detached(settings: Settings, order: Order, directory: StateDirectory) -> bool:
    from app.launch import background, view
    from app.launch.state import Phase

    with directory.lock():
        pass  # refuse here, where the user sees it
    pid = background.fork(lambda: _supervise(settings, order, directory))
    progress = Progress(view.View(output.console()), _down(directory.name))
    state = background.follow(directory, pid, progress)
    progress.done(state)
    return _report(state, state.phase is Phase.READY)


def _supervise(settings: Settings, order: Order, directory: StateDirectory) -> bool:
    """What the forked process does."""
    import asyncio

    from app.launch import background

    with directory.lock():
        background.log_to_file(directory)
        return asyncio.run(_supervisor(settings, order, directory, lambda _: None).run())


def _supervisor(settings: Settings, order: Order, directory: StateDirectory, progress: Any) -> Supervisor:
    from app.launch.supervisor import Supervisor

    return Supervisor(settings, order, directory, progress)


def _report(state: State, ok: bool) -> bool:
    from app.launch import view

    if not ok:
        print(view.failure(state), file=sys.stderr, flush=True)
    return ok


def _down(name: str) -> str:
    return "trivet down" if name == "default" else f"trivet down --name {name}"
