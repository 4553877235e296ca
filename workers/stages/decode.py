"""Decode: generate and stream. A worker that prefills too runs the whole request here."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from app.errors.serving import KVLeaseExpired
from app.messages.deltas import Delta, joined
from app.messages.prompts import RenderedPrompt
from app.messages.tasks import DecodeTask
from workers.host import Host
from workers.items.ready import Ready
from workers.watch import Watch

#: vLLM's RequestOutputKind.FINAL_ONLY, as it travels.
FINAL_ONLY = 2


async def run(host: Host, task: DecodeTask) -> None:
    begun, watch = False, Watch(task)
    try:
        async with _ready(host, task) as ready:
            watch.prepared(ready)
            async with host.budget.reserve(_reach(host, task, ready)):
                watch.lap("queue")
                kv = _blocks(task)
                begun = True
                async with aclosing(_deltas(host, task, ready, kv, watch)) as deltas:
                    await (_send_whole if _whole(task) else _send)(host, task, deltas)
    finally:
        if not begun:
            await refuse(host, task)


async def refuse(host: Host, task: DecodeTask) -> None:
    """The request is over before it began here: let the prefill worker have its blocks back."""
    if task.kv is not None:
        await host.engine.reject(task.request_id, task.kv.params)


@asynccontextmanager
async def _ready(host: Host, task: DecodeTask) -> AsyncIterator[Ready]:
    """The prompt as this engine takes it: rendered by a prefill worker, or to be put together here."""
    from workers import rendered

    if isinstance(task.prompt, RenderedPrompt):
        yield Ready(task.prompt, rendered.engine_input(task.prompt))
    else:
        async with host.prompts.ready(task, task.prompt) as ready:
            yield ready


async def _deltas(
    host: Host, task: DecodeTask, ready: Ready, kv: dict[str, Any] | None, watch: Watch
) -> AsyncGenerator[Delta, None]:
    """The engine's steps; the first one with what the API cannot know of the prompt."""
    from workers import outputs, rendered

    seq = task.seq
    async for output in host.engine.generate(ready.engine_input, task, kv):
        delta = outputs.delta(output, task.request_id, task.attempt, seq)
        if seq == 0 and ready.prompt.items:
            delta.prompt_token_ids = ready.prompt.token_ids
            delta.media_tokens = rendered.media_tokens(ready.engine_input)
        if seq == 0 and task.kv is not None:
            delta.cached_tokens, delta.created_cache_tokens = task.kv.cached_tokens, task.kv.created_cache_tokens
        if task.timings and delta.final:
            watch.engine(output.metrics, pulled=kv is not None)
            delta.measured = watch.measured
        yield delta
        if seq == task.seq:
            await ready.encoded()
        seq += 1


async def _send(host: Host, task: DecodeTask, deltas: AsyncGenerator[Delta, None]) -> None:
    async for delta in deltas:
        host.tokens.put(task.api, delta)


async def _send_whole(host: Host, task: DecodeTask, deltas: AsyncGenerator[Delta, None]) -> None:
    """In two parts, the first token and the rest: from the first on the prefill worker is not needed, and may die."""
    host.tokens.put(task.api, await anext(deltas))
    rest = [delta async for delta in deltas]
    if rest:
        host.tokens.put(task.api, joined(rest))


def _whole(task: DecodeTask) -> bool:
    """Whether the API wants the answer in one piece."""
    return task.kv is not None and task.params.get("output_kind") == FINAL_ONLY


def _reach(host: Host, task: DecodeTask, ready: Ready) -> int:
    """The most tokens that the request can come to hold in the KV cache."""
    answer = task.params.get("max_tokens") or host.engine.max_model_len
    return min(len(ready.prompt.token_ids) + int(answer), host.engine.max_model_len)


def _blocks(task: DecodeTask) -> dict[str, Any] | None:
    if task.kv is None:
        return None
    if time.time() > task.kv.expires_at:
        raise KVLeaseExpired("the request waited longer for its decode worker than prefilled KV blocks are kept")
    return task.kv.params
