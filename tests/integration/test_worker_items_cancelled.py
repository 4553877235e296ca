"""Requests and encode tasks that are cancelled at each of their await points: nothing of them may stay."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from app import keys
from app.roles import Role
from tests.integration.item_cluster import ENCODES, PD, Cluster, E
from tests.integration.stepping import cancelled_at
from tests.items import identity

Work = Callable[[], Coroutine[Any, Any, None]]
#: Far below the time that a request would wait for a worker that does nothing.
SOON_S = 10.0


async def at_each_step(cluster: Cluster, begin: Work, after: Work, least: int) -> None:
    """Cancel the work at its first await point, its second ...; `after` each time another one has to succeed."""
    for step in itertools.count(1):
        cancelled = await cancelled_at(step, begin())
        await cluster.quiet()
        async with asyncio.timeout(SOON_S):
            await after()
        await cluster.quiet()
        if not cancelled:
            break
        for one in cluster.workers:
            one.store.remove(identity(1))
        await cluster.quiet()
    assert step >= least, "as many await points as this has at least"


async def test_where_the_worker_encodes_itself(cluster: Cluster) -> None:
    agg = await cluster.worker("agg@0", ENCODES)
    prompt = await cluster.api.prompt(2, 1)
    await at_each_step(cluster, lambda: agg.answer(prompt), lambda: agg.answer(prompt), 20)


async def test_where_an_encode_worker_has_to_be_asked(cluster: Cluster) -> None:
    await cluster.worker("encode@0", E)
    pd = await cluster.worker("pd@0", PD)
    prompt = await cluster.api.prompt(1)
    await at_each_step(cluster, lambda: pd.answer(prompt), lambda: pd.answer(prompt), 8)
    assert pd.counts.fallbacks == 0


@pytest.mark.parametrize("transport", ["auto", "nixl"])
async def test_where_another_worker_holds_it(cluster: Cluster, transport: str) -> None:
    holder, agg = [await cluster.worker(f"agg@{at}", ENCODES, transport=transport) for at in range(2)]
    prompt = await cluster.api.prompt(1)

    async def ask() -> None:
        await agg.answer(prompt)

    async def after() -> None:
        await ask()
        agg.store.remove(identity(1))
        await holder.answer(prompt)

    await holder.answer(prompt)
    await at_each_step(cluster, ask, after, 4)


async def test_an_encode_task(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    await encode.stop_taking()
    prompt = await cluster.api.prompt(1)

    async def placed() -> bytes | None:
        """The task for the item, if the API found that one is needed."""
        await cluster.api.place(pd.items.fleet.now, pd.items.fingerprint, prompt, "r")
        taken: bytes | None = await cluster.redis.rpop(keys.worker_queue(Role.ENCODE, "encode@0"))
        return taken

    for step in itertools.count(1):
        content = await placed()
        assert content is not None
        cancelled = await cancelled_at(step, encode.run_task(content))
        await cluster.quiet()
        again = await placed()
        if again is not None:
            await encode.run_task(again)
        assert await cluster.holders(1) == {"encode@0"}
        encode.store.remove(identity(1))
        await cluster.quiet()
        if not cancelled:
            break
    assert step >= 8 and again is None
