"""Stopping components: politely, then firmly, then with all that they started."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence

from app.launch.component import Component
from app.launch.process import describe
from app.launch.state import Phase

log = logging.getLogger(__name__)

#: How long a worker may go on with the requests in flight.
DRAIN_S = 10.0

#: Signals and the seconds that each is given, before SIGKILL to the session. Celery's SIGQUIT alone waits for the
#: tasks once more; a second one ends them, and their clients get an error that says so.
WORKER_STEPS = ((signal.SIGTERM, DRAIN_S), (signal.SIGQUIT, 1.0), (signal.SIGQUIT, 4.0))
SERVER_STEPS = ((signal.SIGTERM, 8.0),)

Steps = Sequence[tuple[signal.Signals, float]]


class Hurry:
    """How pressing a stop is: each `press` after the first skips the wait that is going on and those of its kind."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()

    def press(self) -> None:
        (self.now if self.asked.is_set() else self.asked).set()


async def stop_all(components: Sequence[Component], hurry: Hurry) -> list[int]:
    """Workers, then API and Flower, then Redis. Answers the pids that could not be ended."""
    left: list[int] = []
    for kinds, steps in ((("worker",), WORKER_STEPS), (("api", "flower"), SERVER_STEPS), (("redis",), SERVER_STEPS)):
        group = [one for one in components if one.state.kind in kinds]
        for pids in await asyncio.gather(*(stop(one, steps, hurry) for one in group)):
            left += pids
    return left


async def stop(component: Component, steps: Steps, hurry: Hurry) -> list[int]:
    """End one component and its descendants. Answers the pids that could not be ended."""
    process = component.process
    detail = component.state.detail
    if process.running:
        component.enter(Phase.STOPPING)
        await component.note_shared_memory()
        detail = await _end(component, steps, hurry)
    left = await component.clear()
    if component.state.phase is not Phase.FAILED:
        # uvicorn ends by the signal itself, once it has done all that it had to.
        component.enter(Phase.STOPPED, "" if detail in (describe(0), describe(-signal.SIGTERM)) else detail)
    return left


async def _end(component: Component, steps: Steps, hurry: Hurry) -> str:
    """Ask, then insist; answers how it ended."""
    process = component.process
    ended = asyncio.create_task(process.wait())
    for at, (number, wait_s) in enumerate(steps):
        process.signal(number)
        if await _ends(ended, wait_s, hurry if at == 0 else None):
            return describe(ended.result())
    ended.cancel()
    log.warning("%s did not end in time and is killed", component.name)
    return "did not end in time and was killed"


async def _ends(ended: asyncio.Task[int], wait_s: float, hurry: Hurry | None) -> bool:
    """Whether it ends in time; with `hurry`, in the time until the next press."""
    if hurry is None:
        await asyncio.wait({ended}, timeout=wait_s)
        return ended.done()
    pressed = asyncio.create_task(hurry.now.wait())
    try:
        await asyncio.wait({ended, pressed}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        pressed.cancel()
    return ended.done()
