"""After an `up` whose supervisor is gone: end its processes and remove what they left, going by its state."""

from __future__ import annotations

import asyncio
import shutil

from app.launch import redis_keys, sessions, shared_memory
from app.launch.shared_memory import remove_unused
from app.launch.state import ComponentState, Phase, State

#: The children got SIGTERM when their supervisor died: how long they may take to end by themselves.
LEAVE_S = 5.0
POLL_S = 0.1


async def clear(state: State) -> list[str]:
    """Answers what had to be removed, in words. An orderly end has left nothing, so nothing is touched after one."""
    if state.phase in (Phase.STOPPED, Phase.FAILED):
        return []
    done: list[str] = []
    for _ in range(round(LEAVE_S / POLL_S)):
        if not any(_left(one) for one in state.components):
            break
        await asyncio.sleep(POLL_S)
    for one in state.components:
        if left := _left(one):
            await sessions.kill(one.pid, one.ticks)
            done.append(f"killed {one.name} (processes {', '.join(map(str, left))})")
    names = {name for one in state.components for name in one.shared_memory}
    if removed := await asyncio.to_thread(remove_unused, names):
        done.append(f"removed from shared memory: {', '.join(removed)}")
    if swept := await asyncio.to_thread(shared_memory.sweep, state.tensors):
        done.append(f"removed folders of dead processes: {', '.join(swept)}")
    if state.redis_url and not state.owns_redis:
        await redis_keys.remove_all_of(state)
    if state.sockets.exists():
        await asyncio.to_thread(shutil.rmtree, state.sockets, ignore_errors=True)
    return done


def _left(component: ComponentState) -> list[int]:
    return sessions.leftovers(component.pid, component.ticks) if component.pid else []
