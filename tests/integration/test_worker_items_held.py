"""Embeddings that are held, or said to be: workers.items when holders are gone, stores full and records wrong."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import pytest

from app import keys
from app.messages.plans import Assignment
from app.roles import Role
from app.tensors import segment
from tests.integration.item_cluster import ENCODES, PD, Cluster, E
from tests.integration.item_engine import ROWS, WIDTH
from tests.items import identity
from tests.messages import decode_task, worker
from tests.polling import until
from workers.embeddings.store import EmbeddingStore
from workers.items.encoder import Width
from workers.items.local import LocalItems


@pytest.mark.parametrize("gone", ["lease", "file", "agent", "both"])
async def test_a_holder_that_died_is_noticed_and_the_item_encoded_again(cluster: Cluster, gone: str) -> None:
    holder = await cluster.worker("agg@0", ENCODES)
    other = await cluster.worker("agg@1", ENCODES, transport="nixl" if gone == "agent" else "auto")
    await cluster.ask(holder, 1)
    await holder.die()
    if gone != "lease":
        # Its lease is not over yet.
        await holder.host.registry.announce(holder.host.record())
    await other.items.fleet.refresh()
    if gone == "file":
        (holder.store.directory / segment.file_name(identity(1))).unlink()
    elif gone != "lease":
        await holder.items.plane.close()
    if gone == "both":
        shutil.rmtree(holder.folder)
    await asyncio.gather(*(cluster.ask(other, 1) for _ in range(20)))
    # One request looks, and the others look into the index again. A worker known to be dead is not even asked.
    assert other.local.counts.failed == (gone != "lease")
    assert other.engine.encodes == {identity(1): 1}
    await cluster.quiet()
    assert await cluster.holders(1) == {"agg@1"}


async def test_a_holder_on_the_same_host_is_asked_first(cluster: Cluster) -> None:
    holder, other = [await cluster.worker(f"agg@{at}", ENCODES) for at in range(2)]
    await cluster.ask(holder, 1)
    await cluster.quiet()
    near = (await cluster.index.find([identity(1)]))[identity(1)].holders["agg@0"]
    for at in range(20):
        far = Assignment(worker=f"far@{at}", incarnation="f")
        await cluster.redis.set(keys.worker(far.worker), worker(far, Role.DECODE).model_dump_json())
        await cluster.redis.sadd(keys.WORKERS, far.worker)
        elsewhere = near.descriptor.model_copy(update={"host": "another", "agent": "far", "path": "/nowhere"})
        await cluster.index.add_holder(identity(1), far, elsewhere)
    await cluster.ask(other, 1)
    assert (other.local.counts.failed, other.local.counts.fetched, other.items.plane.counts.mapped) == (0, 1, 1)
    await cluster.quiet()


async def test_descriptors_are_renewed_in_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking an item up prolongs what the index says, and not the lease of what it names."""
    holder = await cluster.worker("agg@0", ENCODES)
    await cluster.ask(holder, 1, 2)
    await cluster.quiet()

    async def expiry(number: int) -> float:
        known = (await cluster.index.find([identity(number)]))[identity(number)]
        return float(known.holders["agg@0"].descriptor.expires_at)

    before = [await expiry(1), await expiry(2)]
    holder.local.published._renewed[identity(1)] -= holder.local.published._lease_s / 2
    monkeypatch.setattr(holder.local.published, "_renew_every_s", 0.01)
    renewing = asyncio.create_task(holder.local.published.keep_renewed())

    async def renewed() -> bool:
        return await expiry(1) > before[0]

    try:
        await until(renewed, "the renewal")
    finally:
        renewing.cancel()
    assert await expiry(2) == before[1], "not yet"
    await cluster.quiet()


async def test_what_expires_soon_is_renewed_often(cluster: Cluster) -> None:
    holder = await cluster.worker("agg@0", ENCODES)
    local = holder.items.local
    assert local.published._renew_every_s == 60.0 < local.published._lease_s / 4
    short = LocalItems(
        holder.me, EmbeddingStore(holder.folder / "s", 0), holder.items.plane, cluster.index, 60.0, print, local._alive
    )
    assert short.published._renew_every_s <= 15.0
    await short._files.close()


async def test_what_a_holder_evicts_it_says(cluster: Cluster) -> None:
    holder, other = [await cluster.worker(f"agg@{at}", ENCODES, transport="nixl") for at in range(2)]
    await cluster.ask(holder, 1)
    found = (await cluster.index.find([identity(1)]))[identity(1)]
    holder.store.remove(identity(1))
    await cluster.quiet()
    assert await cluster.holders(1) == set()
    assert await other.local.fetch(identity(1), found) is None, "what was found before"
    await cluster.ask(other, 1)
    assert other.engine.encodes == {identity(1): 1}
    await cluster.quiet()


async def test_a_holders_next_incarnation_stays_in_the_index(cluster: Cluster) -> None:
    holder, other = [await cluster.worker(f"agg@{at}", ENCODES) for at in range(2)]
    await cluster.ask(holder, 1)
    found = (await cluster.index.find([identity(1)]))[identity(1)]
    descriptor = found.holders["agg@0"].descriptor
    await holder.die()
    (holder.store.directory / segment.file_name(identity(1))).unlink()
    await cluster.index.add_holder(identity(1), Assignment(worker="agg@0", incarnation="next"), descriptor)
    assert await other.local.fetch(identity(1), found) is None
    assert await cluster.holders(1) == {"agg@0"}
    await cluster.quiet()


async def test_an_item_that_comes_back_as_soon_as_it_was_evicted(cluster: Cluster) -> None:
    encode = await cluster.worker("encode@0", E)
    pd, reader = [await cluster.worker(f"pd@{at}", PD, transport="nixl") for at in range(2)]
    await cluster.ask(pd, 1)
    for _ in range(30):
        pd.store.remove(identity(1))
        await cluster.ask(pd, 1)
    await cluster.quiet()
    assert await cluster.holders(1) == {"encode@0", "pd@0"}
    await encode.die()
    await cluster.index.withdraw(identity(1), "encode@0")
    await cluster.ask(reader, 1)
    assert reader.local.counts.fetched == 1 and cluster.encodes() == {identity(1): 1}
    await cluster.quiet()


async def test_where_the_store_stays_in_use_an_item_is_encoded_with_its_prompt(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD, room=2)
    pd.items.finder.timeout_s = 0.2
    async with pd.host.prompts.ready(decode_task("r"), await cluster.api.prompt(1, 2)) as ready:
        await pd.engine.run(ready.engine_input)
        await asyncio.gather(*(cluster.ask(pd, 3) for _ in range(5)))
        assert pd.counts.no_room == pd.engine.encodes[identity(3)] == 5
        assert encode.engine.encodes[identity(3)] == 1 and pd.local.counts.failed == 0
    await cluster.quiet()
    assert await cluster.holders(3) == {"encode@0"}


@pytest.mark.parametrize("roles", [[E, PD], [ENCODES]], ids=["e_pd", "agg"])
async def test_an_item_larger_than_any_store_is_encoded_with_each_prompt(cluster: Cluster, roles: list[Any]) -> None:
    workers = [await cluster.worker(f"w@{at}", one, room=1) for at, one in enumerate(roles)]
    for one in workers:
        one.engine.renderer.large[identity(1)] = 64
    last = workers[-1]
    last.engine.gate.clear()
    asking = [asyncio.create_task(cluster.ask(last, 1)) for _ in range(10)]
    # They do not wait for each other's answers.
    await until(lambda: last.engine.at_the_gate == 10, "all encodes")
    last.engine.gate.set()
    await asyncio.gather(*asking)
    assert cluster.encodes() == last.engine.encodes == {identity(1): 10}
    await cluster.quiet()
    assert await cluster.holders(1) == set()


async def test_an_engine_that_does_not_save_keeps_nobody_waiting(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    encode.engine.saves = False
    await asyncio.gather(*(cluster.ask(pd, 1) for _ in range(5)))
    assert encode.engine.encodes[identity(1)] == 1 == pd.engine.encodes[identity(1)]
    pd.engine.saves = False
    await asyncio.gather(*(cluster.ask(pd, 2) for _ in range(5)))
    assert pd.engine.encodes[identity(2)] == 5
    await cluster.quiet()
    assert (await cluster.holders(1), await cluster.holders(2)) == ({"pd@0"}, set())


async def test_a_record_that_is_too_large_keeps_nobody_waiting(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    for one in (encode, pd):
        one.items.index._max_record_kb = 0
    await asyncio.gather(*(cluster.ask(pd, 1) for _ in range(5)))
    assert pd.engine.encodes == {identity(1): 1}, "and the others find it in this worker's store"
    await cluster.quiet()
    assert await cluster.holders(1) == set()


async def test_an_embedding_too_large_to_be_read_here_stays_with_its_holder(cluster: Cluster) -> None:
    """Own trouble of this worker, as full shared memory would be."""
    await cluster.worker("encode@0", E)
    pd = await cluster.worker("pd@0", PD, max_buffer_mb=0.0001)
    await cluster.ask(pd, 1)
    assert (pd.local.counts.failed, pd.counts.no_room, pd.engine.encodes[identity(1)]) == (1, 1, 1)
    await cluster.quiet()
    assert await cluster.holders(1) == {"encode@0"}


async def test_a_record_of_another_width_than_the_engines_is_not_used(cluster: Cluster) -> None:
    holder, other = [await cluster.worker(f"agg@{at}", ENCODES) for at in range(2)]
    await cluster.ask(holder, 1)
    other.items.encoder.widths["image"] = Width(WIDTH * 2, "float32")
    await cluster.ask(other, 1)
    assert (other.local.counts.fetched, other.engine.encodes[identity(1)]) == (0, 1)
    await cluster.quiet()


@pytest.mark.parametrize("wrong", ["dtype", "shape", "item"])
async def test_a_holder_of_something_else_than_the_record_says_is_not_used(cluster: Cluster, wrong: str) -> None:
    holder, other = [await cluster.worker(f"agg@{at}", ENCODES) for at in range(2)]
    await cluster.ask(holder, 1, 2)
    known = await cluster.index.find([identity(1), identity(2)])
    descriptor = known[identity(1)].holders["agg@0"].descriptor
    lie = {
        "dtype": descriptor.model_copy(update={"dtype": "int32"}),
        "shape": descriptor.model_copy(update={"shape": [ROWS * 2, WIDTH // 2]}),
        "item": known[identity(2)].holders["agg@0"].descriptor,
    }[wrong]
    await cluster.index.add_holder(identity(1), holder.me, lie)
    await cluster.ask(other, 1)
    assert (other.local.counts.failed, other.local.counts.fetched) == (1, 0)
    assert other.engine.encodes == {identity(1): 1}
    await cluster.quiet()
    assert await cluster.holders(1) == {"agg@1"}


async def test_a_file_that_somebody_deleted_is_fetched_again(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    await cluster.ask(pd, 1)
    await cluster.quiet()
    (pd.store.directory / segment.file_name(identity(1))).unlink()
    await cluster.ask(pd, 1)
    assert pd.local.counts.fetched == 2 and encode.engine.encodes == {identity(1): 1}
    await cluster.quiet()
    assert await cluster.holders(1) == {"encode@0", "pd@0"}


async def test_a_redis_that_was_emptied_learns_again_what_is_held(cluster: Cluster) -> None:
    encode = await cluster.worker("encode@0", E)
    pd, other = [await cluster.worker(f"pd@{at}", PD) for at in range(2)]
    await cluster.ask(pd, 1)
    await cluster.quiet()
    await cluster.redis.flushall()
    await encode.host.registry.announce(encode.host.record())
    await cluster.ask(other, 1, placed=False)
    assert encode.engine.encodes == {identity(1): 1}, "it has it still, and says so"
    await cluster.quiet()
    await cluster.redis.flushall()
    pd.local.published._renewed[identity(1)] = 0.0
    await cluster.ask(pd, 1, placed=False)
    await cluster.quiet()
    found = (await cluster.index.find([identity(1)]))[identity(1)]
    assert found.record is not None and set(found.holders) == {"pd@0"}
