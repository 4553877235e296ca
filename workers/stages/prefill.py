"""Prefill: fill the KV cache with the prompt, hand the blocks to the decode worker."""

from __future__ import annotations

import asyncio
import time

from app import keys
from app.celery import DECODE_TASK
from app.messages import DecodeTask, KVHandoff, PrefillTask
from app.roles import Role
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
    common = task.model_dump(exclude={"prompt"}) | {"measured": watch.measured if task.timings else {}}
    decode = DecodeTask(**common, prompt=ready.prompt, kv=handoff, seq=said)
    await host.sender.send(DECODE_TASK, decode, keys.worker_queue(Role.DECODE, task.plan.decode.worker))
    await host.unplace(task.request_id)


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
