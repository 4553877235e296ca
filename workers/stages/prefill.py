"""Prefill: fill the KV cache with the prompt, hand the blocks to the decode worker."""

from __future__ import annotations

import asyncio
import time

from app import keys
from app.celery import DECODE_TASK
from app.messages.prompts import RenderedPrompt
from app.messages.tasks import DecodeTask, KVHandoff, PrefillTask
from app.roles import Role
from app.routing import Ask, Decision, View
from app.routing.blocks import Span, chain
from workers import metrics
from workers.engine import Prefilled
from workers.host import Host
from workers.items.ready import Ready
from workers.watch import Watch

#: Blocks are not read this close to the end of their lease: the read itself takes time.
LEASE_MARGIN_S = 5.0


async def run(host: Host, task: PrefillTask) -> None:
    watch = Watch(task)
    async with host.prompts.ready(task, task.prompt) as ready:
        watch.prepared(ready)
        prefilled = await host.engine.prefill(ready.engine_input, task)
        watch.engine(prefilled.stats, pulled=False)
        # From here on the blocks are held; a request cancelled now is handed on all the same, for the decode worker
        # to free them.
        await asyncio.shield(_hand_on(host, task, ready, prefilled, watch))
        await ready.encoded()


async def refuse(host: Host, task: PrefillTask) -> None:
    """The request is over before it began here, and holds nothing yet."""


async def _hand_on(host: Host, task: PrefillTask, ready: Ready, prefilled: Prefilled, watch: Watch) -> None:
    expires_at = time.time() + host.settings.engine.kv_lease_s - LEASE_MARGIN_S
    said = await _say_of_the_prompt(host, task, ready, prefilled)
    cached = {"cached_tokens": prefilled.cached_tokens, "created_cache_tokens": prefilled.created_cache_tokens}
    handoff = KVHandoff(params=prefilled.kv, expires_at=expires_at, **cached)
    decision = await _choose(host, task, ready.prompt)
    common = task.model_dump(exclude={"prompt", "plan"}) | {"measured": watch.measured if task.timings else {}}
    decode = DecodeTask(**common, plan=decision.plan, prompt=ready.prompt, kv=handoff, seq=said)
    assert decode.plan.decode is not None
    queue = keys.worker_queue(Role.DECODE, decode.plan.decode.worker)
    await host.sender.send(DECODE_TASK, decode, queue, decision.step)


async def _choose(host: Host, task: PrefillTask, prompt: RenderedPrompt) -> Decision:
    """The decode worker, by the loads of this moment and what each has of the prompt. Its reservation is made."""
    spans = [Span(item.identity, item.offset, item.length) for item in prompt.items]
    salt = prompt.cache_salt or ""
    blocks = chain(prompt.token_ids, host.engine.event_block_size, items=spans, adapter=task.adapter, salt=salt)
    ask = Ask(
        request_id=task.request_id,
        deadline=task.deadline,
        owner=task.api,
        view=View(tuple(blocks), len(prompt.token_ids)),
        max_tokens=task.params.get("max_tokens") or 0,
        session=task.session,
        tenant=task.tenant,
        priority=task.priority,
        adapter=task.adapter,
    )
    fleet = await host.fleet.holding(task.adapter, lambda fleet: bool(fleet.without(task.avoid).decoders()))
    decision = await host.router.hand_off(fleet.without(task.avoid), ask, task.plan)
    metrics.HANDED_OFF.labels(decision.reasons.policy, decision.reasons.fallback).inc()
    return decision


async def _say_of_the_prompt(host: Host, task: PrefillTask, ready: Ready, prefilled: Prefilled) -> int:
    """The prompt's log-probabilities, if they were asked for; answers how many deltas that took.

    They can be megabytes: the API gets them from here, and not through the decode worker, whose tokens would wait. The
    channel keeps its order, so they have to be sent before the decode worker can begin.
    """
    if prefilled.prompt_logprobs is None:
        return 0
    from workers import outputs, rendered

    delta = outputs.of_prompt(prefilled, task.request_id, task.attempt)
    if ready.prompt.items:
        delta.prompt_token_ids = ready.prompt.token_ids
        delta.media_tokens = rendered.media_tokens(ready.engine_input)
    host.tokens.put(task.api, delta)
    await host.tokens.flushed(task.api)
    return 1
