"""Prefill: render the prompt, fill the KV cache, hand the blocks to the decode worker."""

from __future__ import annotations

import asyncio
import time

from app import keys
from app.celery import DECODE_TASK
from app.messages import DecodeTask, KVHandoff, PrefillTask
from app.roles import Role
from workers.host import Host

#: Blocks are not read this close to the end of their lease: the read itself takes time.
LEASE_MARGIN_S = 5.0


async def run(host: Host, task: PrefillTask) -> None:
    from workers import rendered

    engine_input = await host.engine.render(task.prompt)
    kv = await host.engine.prefill(engine_input, task)
    handoff = KVHandoff(params=kv, expires_at=time.time() + host.settings.engine.kv_lease_s - LEASE_MARGIN_S)
    decode = DecodeTask(**task.model_dump(exclude={"prompt"}), prompt=rendered.without_pixels(engine_input), kv=handoff)
    # From here on the blocks are held; a request cancelled now is handed on all the same, for the decode worker
    # to free them.
    await asyncio.shield(_hand_on(host, decode))


async def refuse(host: Host, task: PrefillTask) -> None:
    """The request is over before it began here, and holds nothing yet."""


async def _hand_on(host: Host, task: DecodeTask) -> None:
    queue = keys.worker_queue(Role.DECODE, task.plan.decode.worker)
    await host.sender.send(DECODE_TASK, task, queue, len(task.prompt.token_ids))
    await host.unplace(task.request_id)
