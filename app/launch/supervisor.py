"""The supervisor of an `up`: starts all components at once, watches them, and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.launch import cleanup, preflight, readiness, redis_keys, redis_server, sessions, shutdown
from app.launch.component import Component
from app.launch.errors import LaunchError, StartFailed
from app.launch.layout import Layout
from app.launch.plan import Engine
from app.launch.state import Phase, State, StateDirectory
from app.redis import UnsafeBroker
from app.settings import Settings

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_S = 0.5
CARE_S = 5.0
MAX_LOG_BYTES = 64 << 20
#: The kernel takes 107 bytes for the path of a socket, and vLLM's names have 37.
MAX_SOCKET_DIRECTORY = 50


@dataclass(frozen=True)
class Order:
    """What `trivet up` was asked for, beside the settings. `timeout_s` limits the start of the whole.

    `api_key` opens the API, if that needs one.
    """

    topology: str
    engines: Sequence[Engine]
    timeout_s: float
    warnings: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)


class Supervisor:
    """Runs one `up`. `show` is called with the state at each change, and twice a second."""

    def __init__(
        self, settings: Settings, order: Order, directory: StateDirectory, show: Callable[[State], None]
    ) -> None:
        self._settings = settings
        self._order = order
        self._directory = directory
        self._show = show
        self._components: list[Component] = []
        self._hurry = shutdown.Hurry()
        self.state = State(
            name=directory.name,
            pid=os.getpid(),
            ticks=sessions.start_ticks(os.getpid()) or 0,
            started=time.time(),
            topology=order.topology,
            model=settings.served_name,
            needs_key=order.api_key is not None,
            api_keys_file=Path(named).absolute() if (named := settings.api.api_keys_file) else None,
            warnings=list(order.warnings),
            logs=directory.logs,
            sockets=_socket_directory(),
            tensors=Path(settings.tensors.directory).absolute(),
        )

    async def run(self) -> bool:
        """Start, watch, stop. False when it did not become ready; the state says why."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._hurry.press)
        sessions.adopt_orphans()
        try:
            await self._clear_up_after_the_last()
            await self._supervise()
        except* Exception as group:
            self._fail(group)
        await self._end()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        return self.state.phase is Phase.STOPPED

    async def _clear_up_after_the_last(self) -> None:
        """An `up` of this name whose supervisor was killed may have left processes and files."""
        last = self._directory.read()
        self._changed()
        if last is not None:
            await cleanup.clear(last)

    async def _supervise(self) -> None:
        settings, own_redis = await self._prepare()
        layout = Layout(settings, self.state, self._changed)
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._start(group, layout, own_redis), self._tick(), self._care()):
                    group.create_task(work)
                await self._hurry.asked.wait()
                raise _Stop
        except* _Stop:
            pass
        finally:
            await layout.aclose()

    async def _prepare(self) -> tuple[Settings, tuple[str, int] | None]:
        """Decide on Redis, and refuse what cannot come up; nothing has been started yet."""
        await asyncio.to_thread(preflight.refuse_taken_ports, self._settings)
        servers = await redis_server.choose(self._settings.redis)
        settings, state = self._settings.model_copy(update={"redis": servers.settings}), self.state
        if servers.note:
            state.warnings.append(servers.note)
        state.redis_url, state.cache_url = settings.redis.broker_url, settings.redis.cache
        state.owns_redis = servers.own is not None
        state.api_url = f"http://{_reachable(settings.api.host)}:{settings.api.port}"
        if settings.flower.enabled:
            state.flower_url = f"http://{_reachable(settings.flower.host)}:{settings.flower.port}"
        return settings, servers.own

    async def _start(self, group: asyncio.TaskGroup, layout: Layout, own_redis: tuple[str, int] | None) -> None:
        """Start Redis, then everything else at once, and return when a request has succeeded."""
        waited_for = "Redis"
        try:
            async with asyncio.timeout(self._order.timeout_s):
                if own_redis is not None:
                    await self._launch(group, [layout.redis(own_redis)])
                else:
                    names = [one.id for one in self._order.engines]
                    await preflight.refuse_taken_names(layout.registry, names, self._settings.worker.lease_s)
                waited_for = "workers, API and Flower"
                rest = [*layout.workers(self._order.engines), layout.api()]
                await self._launch(group, rest + ([layout.flower()] if self.state.flower_url else []))
                waited_for = "a first request to succeed"
                key = self._order.api_key
                self.state.does = await readiness.first_request(
                    layout.client, self.state.api_url, self.state.model, key
                )
        except TimeoutError:
            late = [one.name for one in self._components if not one.ready_once.is_set()]
            limit = f"{self._order.timeout_s:.0f} s (--timeout)"
            raise StartFailed(
                late[0] if late else "", f"not up after {limit}, waiting for {', '.join(late) or waited_for}"
            ) from None
        self.state.phase = Phase.READY
        self._changed()

    async def _launch(self, group: asyncio.TaskGroup, components: list[Component]) -> None:
        self._components += components
        self.state.components = [one.state for one in self._components]
        for one in components:
            one.state.log.unlink(missing_ok=True)
            group.create_task(one.keep())
        for one in components:
            await one.ready_once.wait()

    async def _tick(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(SHOW_S)

    async def _care(self) -> None:
        """Note what would have to be removed after a SIGKILL, and keep logs from filling the disk."""
        while True:
            await asyncio.sleep(CARE_S)
            before = self.state.model_dump_json()
            for one in self._components:
                await one.note_shared_memory()
                try:
                    await asyncio.to_thread(trim, one.state.log)
                except OSError as error:
                    log.error("%s: %s", one.state.log, error)
            if self.state.model_dump_json() != before:
                self._changed()

    async def _end(self) -> None:
        """Stop everything, remove what is left of it, and say so in the state."""
        failed = self.state.phase is Phase.FAILED
        if not failed and self.state.phase is not Phase.READY:
            self._fail_with("", "stopped before it was ready")
            failed = True
        self.state.phase = Phase.STOPPING
        self._changed()
        left = await shutdown.stop_all(self._components, self._hurry)
        if self.state.redis_url and not self.state.owns_redis:
            await redis_keys.remove_all_of(self.state)
        await asyncio.to_thread(shutil.rmtree, self.state.sockets, ignore_errors=True)
        if left:
            self._fail_with("", f"processes {left} do not end: see {self.state.logs}")
        self.state.phase = Phase.FAILED if failed or left else Phase.STOPPED
        self._changed()

    def _fail(self, group: BaseExceptionGroup[Exception]) -> None:
        """Keep the first reason. What nobody foresaw goes to the log whole."""
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, StartFailed):
            self._fail_with(first.component, first.reason)
        elif isinstance(first, (LaunchError, UnsafeBroker)):
            self._fail_with("", str(first))
        else:
            log.error("the supervisor failed", exc_info=group)
            self._fail_with("", f"{type(first).__name__}: {first} (see {self.state.logs / 'supervisor.log'})")

    def _fail_with(self, component: str, reason: str) -> None:
        self.state.phase, self.state.failed_component, self.state.reason = Phase.FAILED, component, reason

    def _changed(self) -> None:
        try:
            self._directory.write(self.state)
        except OSError as error:  # a full disk is no reason to stop serving
            log.error("the state is not written: %s", error)
        self._tell()

    def _tell(self) -> None:
        try:
            self._show(self.state)
        except OSError as error:  # nor is a reader that went away
            log.warning("nothing is shown any more: %s", error)
            self._show = lambda _: None


class _Stop(Exception):
    """Ends the group of tasks; the processes are stopped after that, in their order."""


def trim(path: Path) -> None:
    """Start a log of 64 MiB anew and keep the old one beside it. Its writer appends, so the file may be emptied."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(path, path.with_suffix(".log.1"))
        os.truncate(path, 0)


def _socket_directory() -> Path:
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="trivet-", dir=root if len(root) < MAX_SOCKET_DIRECTORY else "/tmp"))


def _reachable(host: str) -> str:
    """A host that clients on this machine can use for the address listened on."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
