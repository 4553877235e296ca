"""Prefill: fill the KV cache with the prompt, hand the blocks to the decode worker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from app import keys
from app.celery import DECODE_TASK
from app.messages import DecodeTask, KVHandoff, PrefillTask, RenderedPrompt
from app.roles import Role
from workers.host import Host

#: Blocks are not read this close to the end of their lease: the read itself takes time.
LEASE_MARGIN_S = 5.0


async def run(host: Host, task: PrefillTask) -> None:
    async with host.prompts.ready(task, task.prompt) as ready:
        kv = await host.engine.prefill(ready.engine_input, task)
        # From here on the blocks are held; a request cancelled now is handed on all the same, for the decode worker
        # to free them.
        await asyncio.shield(_hand_on(host, task, ready.prompt, kv))
        await ready.encoded()


async def refuse(host: Host, task: PrefillTask) -> None:
    """The request is over before it began here, and holds nothing yet."""


async def _hand_on(host: Host, task: PrefillTask, prompt: RenderedPrompt, kv: dict[str, Any]) -> None:
    handoff = KVHandoff(params=kv, expires_at=time.time() + host.settings.engine.kv_lease_s - LEASE_MARGIN_S)
    decode = DecodeTask(**task.model_dump(exclude={"prompt"}), prompt=prompt, kv=handoff)
    await host.sender.send(DECODE_TASK, decode, keys.worker_queue(Role.DECODE, task.plan.decode.worker))
    await host.unplace(task.request_id)
