"""Which KV blocks Redis names for each worker of a topology."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app import keys
from app.roles import Role
from app.settings_sections import WorkerSettings
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import MODEL, Stack
from tests.polling import until

LEASE_MS = 1000 * WorkerSettings().lease_s


def names(stack: Stack, worker: str) -> set[Any]:
    return set(stack.redis.smembers(keys.kv(worker, 0)))


@pytest.mark.parametrize("prompt", ["long text", "4 images and text between"])
@pytest.mark.parametrize("topology", ["agg", "pd", "e_p_d"])
async def test_whoever_has_a_prompts_blocks_says_so(stacks: Any, topology: str, prompt: str) -> None:
    """A decode worker, too, of blocks that it pulled: it needs not pull them again."""
    stack: Stack = stacks[topology]
    answer = await asyncio.to_thread(
        stack.client.chat.completions.create, model=MODEL, messages=PROMPTS[prompt], max_tokens=4, temperature=0.0
    )
    blocks = answer.usage.prompt_tokens // next(iter(stack.workers().values())).engine.block_size
    assert blocks >= 2
    caching = [one for one in stack.all_workers() if one.roles & {Role.PREFILL, Role.DECODE}]
    assert len(caching) == (1 if topology == "agg" else 2)

    def same() -> bool:
        """All of them have as much of the prompt: what two of them have in common is the prompts they shared."""
        held = [names(stack, one.id) for one in caching]
        return len(set.intersection(*held)) >= blocks

    await until(same, f"{blocks} blocks are named for {[one.id for one in caching]}", 20.0)
    for one in stack.all_workers():
        held = stack.redis.pttl(keys.kv(one.id, 0))
        assert (0 < held <= LEASE_MS) == (one in caching), one.id
