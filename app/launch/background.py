"""`trivet up --detach`: the supervisor in the background, followed until it is ready or has failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from app.launch.errors import LaunchError
from app.launch.state import Phase, State, StateDirectory

POLL_S = 0.2
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_file(directory: StateDirectory) -> None:
    """The supervisor's own log: the terminal belongs to the table."""
    logging.basicConfig(
        filename=directory.logs / "supervisor.log", filemode="w", format=LOG_FORMAT, level="INFO", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


def fork(work: Callable[[], bool]) -> int:
    """Run `work` in a new session without a terminal and answer its pid. It must not have threads to lose."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        code = 0 if work() else 1
    except BaseException:
        logging.getLogger(__name__).exception("the supervisor failed")
    finally:
        logging.shutdown()
        os._exit(code)


def follow(directory: StateDirectory, pid: int, show: Callable[[State], None]) -> State:
    """Show the states that process `pid` writes until it is ready or has ended; answers the last one.

    An interrupt stops what was being started.
    """
    ended = False
    while True:
        try:
            ended = ended or _ended(pid)
            state = directory.read()
            if state is not None and state.pid == pid:
                show(state)
                if state.phase is Phase.READY or ended:
                    return state
            elif ended:
                raise LaunchError(f"the supervisor ended before it began; see {directory.logs / 'supervisor.log'}")
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid
