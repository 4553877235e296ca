"""Prefill: fill the KV cache with the prompt, hand the blocks to the decode worker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from app import keys
from app.celery import DECODE_TASK
from app.messages import DecodeTask, KVHandoff, PrefillTask, RenderedPrompt
from app.roles import Role
from app.routing import Ask, Decision, View
from app.routing.blocks import Span, chain
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
    decision = await _choose(host, task, prompt)
    decode = DecodeTask(**task.model_dump(exclude={"prompt", "plan"}), plan=decision.plan, prompt=prompt, kv=handoff)
    assert decode.plan.decode is not None
    queue = keys.worker_queue(Role.DECODE, decode.plan.decode.worker)
    await host.sender.send(DECODE_TASK, decode, queue, decision.step)


async def _choose(host: Host, task: PrefillTask, prompt: RenderedPrompt) -> Decision:
    """The decode worker, by the loads of this moment and what each has of the prompt. Its reservation is made."""
    spans = [Span(item.identity, item.offset, item.length) for item in prompt.items]
    blocks = chain(prompt.token_ids, host.engine.block_size, items=spans, salt=prompt.cache_salt or "")
    ask = Ask(
        request_id=task.request_id,
        deadline=task.deadline,
        owner=task.api,
        view=View(tuple(blocks), len(prompt.token_ids)),
        max_tokens=task.params.get("max_tokens") or 0,
        session=task.session,
        tenant=task.tenant,
        priority=task.priority,
    )
    return await host.router.hand_off(host.fleet.now, ask, task.plan)
