"""`trivet down`: ask the supervisor to stop, insist if it does not, and clear up after one that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from app.launch import cleanup, sessions
from app.launch.errors import LaunchError
from app.launch.state import Phase, State, StateDirectory

#: More than all steps of an orderly stop take together.
STOP_S = 60.0
POLL_S = 0.2


async def down(directory: StateDirectory, show: Callable[[State], None]) -> str:
    """Answers what was done, in words. Raises LaunchError when something could not be ended."""
    state = directory.read()
    if state is None:
        return f"nothing runs under the name '{directory.name}'"
    was_running = state.running
    if was_running:
        state = await _ask(directory, state, show)
    with directory.lock(timeout_s=5.0):
        done = await cleanup.clear(state)
        left = [one.name for one in state.components if one.pid and sessions.leftovers(one.pid, one.ticks)]
        if left:
            raise LaunchError(f"still running: {', '.join(left)}; see {state.logs}")
        directory.forget()
    if state.phase in (Phase.STOPPED, Phase.FAILED) and not was_running:
        return f"nothing runs under the name '{directory.name}'"
    return "; ".join(["stopped" if was_running else "the supervisor was gone; what it had started is too", *done])


async def _ask(directory: StateDirectory, state: State, show: Callable[[State], None]) -> State:
    """SIGTERM to the supervisor and a minute to obey, then SIGKILL. Answers the last state that it wrote."""
    with suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    until = time.monotonic() + STOP_S
    while state.running:
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)
            return directory.read() or state
        await asyncio.sleep(POLL_S)
        state = directory.read() or state
        show(state)
    return directory.read() or state
