"""What an `up` is doing, in a file: read by `status`, `down`, `chat` and whoever follows a detached start."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from app.launch import sessions
from app.launch.errors import LaunchError
from app.roles import Does

HOME_VARIABLE = "TRIVET_HOME"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}")


class Phase(StrEnum):
    """Where the whole, or one component, stands."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ComponentState(BaseModel):
    """One process of an `up`.

    `ticks` is its start in clock ticks since boot, `since` (unix seconds) when the phase began. `shared_memory` names
    files in /dev/shm that it was seen to use.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    kind: str
    phase: Phase = Phase.STARTING
    since: float = 0.0
    pid: int = 0
    ticks: int = 0
    restarts: int = 0
    detail: str = ""
    log: Path
    shared_memory: list[str] = []


class State(BaseModel):
    """One `up`. `ticks` is the supervisor's start in clock ticks since boot, `started` the same in unix seconds.

    `does` is known when it is ready. `needs_key`: the API is for clients with a key. `api_keys_file` has some, if it
    was named; none is in here. `tensors` is `tensors.directory`, which whoever reads this may have set otherwise.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    pid: int
    ticks: int
    started: float
    topology: str
    model: str
    does: Does = Does.GENERATE
    phase: Phase = Phase.STARTING
    failed_component: str = ""
    reason: str = ""
    warnings: list[str] = []
    api_url: str = ""
    needs_key: bool = False
    api_keys_file: Path | None = None
    flower_url: str | None = None
    redis_url: str = ""
    cache_url: str = ""
    owns_redis: bool = False
    logs: Path
    sockets: Path
    tensors: Path = Path("/dev/shm")
    components: list[ComponentState] = []

    @property
    def running(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        return sessions.alive(self.pid, self.ticks)


class StateDirectory:
    """`<home>/<name>`: state.json, logs, and a lock that the supervisor holds for as long as it runs."""

    def __init__(self, name: str) -> None:
        """Raises LaunchError when the name cannot be part of a path and of a worker's id."""
        if not _NAME.fullmatch(name):
            raise LaunchError(
                f"--name {name!r}: up to 41 letters, digits, '-' and '_', beginning with a letter or digit"
            )
        self.name = name
        self.path = home() / name
        self.logs = self.path / "logs"
        self._file = self.path / "state.json"

    def make(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)  # URLs may hold passwords

    def read(self) -> State | None:
        """The last state, also of an `up` that has ended; None where there is none that this version can read."""
        try:
            return State.model_validate_json(self._file.read_bytes())
        except (OSError, ValidationError):
            return None

    def running(self) -> State | None:
        """The state of an `up` that runs."""
        state = self.read()
        return state if state is not None and state.running else None

    def write(self, state: State) -> None:
        """Replace the file whole: readers see the old or the new."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(state.model_dump_json(indent=1))
        fresh.replace(self._file)

    def forget(self) -> None:
        with suppress(FileNotFoundError):
            self._file.unlink()

    @contextmanager
    def lock(self, timeout_s: float = 0.0) -> Iterator[None]:
        """Hold the lock while the block runs. Raises LaunchError when another supervisor holds it."""
        self.make()
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + timeout_s
            while not _locked(handle):
                if time.monotonic() >= until:
                    raise self.busy()
                time.sleep(0.05)
            yield
        finally:
            os.close(handle)

    def busy(self) -> LaunchError:
        state = self.running()
        who = f" (supervisor {state.pid}, API {state.api_url})" if state else ""
        option = "" if self.name == "default" else f" --name {self.name}"
        return LaunchError(
            f"'{self.name}' is already running{who}; stop it with `trivet down{option}`, "
            "or give the new one another --name"
        )


def home() -> Path:
    """Where states and logs are: TRIVET_HOME, or `trivet` in the user's state directory (XDG_STATE_HOME)."""
    if named := os.environ.get(HOME_VARIABLE):
        return Path(named).absolute()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "trivet"


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
