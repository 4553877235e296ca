"""Items of prompts, from the miss to the answer: workers.items with several workers over one Redis."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from app.errors.base import RemoteFailure
from app.errors.media import MediaRefused
from app.errors.requests import InvalidRequest, PromptTooLong
from app.items.index import ItemIndex
from app.messages.prompts import Prompt
from tests.integration import item_cluster, item_engine
from tests.integration.item_cluster import ENCODES, PD, Cluster, E, Worker
from tests.integration.item_engine import CONTEXT, ITEM, ROWS, TARGET, WIDTH, FakeEngine
from tests.items import identity
from tests.messages import decode_task
from tests.polling import until
from workers.items.self_check import EncoderBroken


@pytest.mark.parametrize("transport", ["auto", "nixl"])
async def test_what_nobody_has_is_encoded_by_the_encode_worker_and_then_held_by_both(
    cluster: Cluster, transport: str
) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD, transport=transport)
    await cluster.ask(pd, 1)
    assert cluster.encodes() == encode.engine.encodes == {identity(1): 1}
    assert pd.engine.loads == {identity(1): 1}
    await cluster.quiet()
    assert await cluster.holders(1) == {"encode@0", "pd@0"}
    counts = pd.items.plane.counts
    # The item, and no medium: this worker never reads one.
    assert (counts.mapped, counts.nixl) == ((1, 0) if transport == "auto" else (0, 1))
    assert (pd.counts.waited, pd.local.counts.fetched, pd.counts.here) == (1, 1, 0)
    await cluster.ask(pd, 1)
    assert (pd.counts.here, cluster.encodes().total()) == (1, 1)
    assert (pd.counts.encoded_here, pd.counts.fallbacks, pd.counts.sent_again) == (0, 0, 0)
    await cluster.quiet()


@pytest.mark.parametrize("roles", [[E, PD, PD], [ENCODES] * 3], ids=["e_pd", "agg"])
async def test_50_requests_at_once_for_one_item_are_one_encode(cluster: Cluster, roles: list[Any]) -> None:
    workers = [await cluster.worker(f"w@{at}", one) for at, one in enumerate(roles)]
    askers = [one for one in workers if "prefill" in one.settings.roles]
    await asyncio.gather(*(cluster.ask(askers[at % len(askers)], 1) for at in range(50)))
    assert cluster.encodes() == {identity(1): 1}
    assert sum(one.counts.fallbacks for one in askers) == 0
    await cluster.quiet()


async def test_200_requests_for_20_items_are_20_encodes(cluster: Cluster) -> None:
    for at in range(2):
        await cluster.worker(f"encode@{at}", E)
    askers = [await cluster.worker(f"pd@{at}", PD) for at in range(2)]
    await asyncio.gather(*(cluster.ask(askers[at % 2], at % 20) for at in range(200)))
    assert cluster.encodes() == Counter({identity(at): 1 for at in range(20)})
    await cluster.quiet()


async def test_prompts_that_want_each_others_items_do_not_wait_for_each_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker encodes for itself; claims come in any order."""
    claim, dice = ItemIndex.claim, random.Random(7)

    async def late(self: Any, *arguments: Any, **more: Any) -> Any:
        await asyncio.sleep(dice.random() * 0.004)
        return await claim(self, *arguments, **more)

    monkeypatch.setattr(ItemIndex, "claim", late)
    workers = [await cluster.worker(f"agg@{at}", ENCODES) for at in range(3)]
    async with asyncio.timeout(cluster.encode_timeout_s * 0.8):
        for round in range(15):
            items = [round * 3 + at for at in range(3)]
            orders = [dice.sample(items, 3) for _ in range(6)]
            await asyncio.gather(*(cluster.ask(workers[at % 3], *order) for at, order in enumerate(orders)))
    assert cluster.encodes() == Counter({identity(at): 1 for at in range(45)})
    await cluster.quiet()


async def test_one_item_twice_in_a_prompt_is_one_item_in_two_places(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    prompt = await cluster.api.prompt(1, 2, 1)
    await cluster.ask(pd, prompt=prompt)
    assert encode.engine.encodes == {identity(1): 1, identity(2): 1}
    assert pd.engine.loads == {identity(1): 2, identity(2): 1}
    async with pd.host.prompts.ready(decode_task("r"), prompt) as ready:
        places = [(item.identity[-1], item.offset, item.length) for item in ready.prompt.items]
    length = ROWS + 2
    assert places == [("1", 1, length), ("2", 2 + length, length), ("1", 3 + 2 * length, length)]
    await cluster.quiet()


async def test_one_item_twice_is_encoded_once_where_it_is_wanted(cluster: Cluster) -> None:
    agg = await cluster.worker("agg@0", ENCODES)
    await cluster.ask(agg, 3, 3)
    assert agg.engine.encodes == agg.engine.loads == {identity(3): 1}
    assert agg.counts.encoded_here == 1
    await cluster.quiet()


async def test_a_request_that_is_cancelled_lets_the_next_of_its_worker_go_on(cluster: Cluster) -> None:
    agg = await cluster.worker("agg@0", ENCODES)
    agg.engine.gate.clear()
    first = asyncio.create_task(cluster.ask(agg, 1))
    await until(lambda: agg.engine.at_the_gate, "the encode")
    second = asyncio.create_task(cluster.ask(agg, 1))
    await until(lambda: agg.counts.waited, "the second to wait for the first")
    first.cancel()
    agg.engine.gate.set()
    async with asyncio.timeout(10):
        await second
    assert first.cancelled() and cluster.encodes() == {identity(1): 1}
    await cluster.quiet()
    assert await cluster.holders(1) == {"agg@0"}


async def test_what_was_encoded_for_a_request_that_was_cancelled_is_shared(cluster: Cluster) -> None:
    one, other = [await cluster.worker(f"agg@{at}", ENCODES) for at in range(2)]
    prompt = await cluster.api.prompt(1)
    with pytest.raises(asyncio.CancelledError):
        async with one.host.prompts.ready(decode_task("r"), prompt) as ready:
            await one.engine.run(ready.engine_input)
            raise asyncio.CancelledError
    await cluster.quiet()
    assert await cluster.holders(1) == {"agg@0"}
    await cluster.ask(other, 1)
    assert cluster.encodes() == {identity(1): 1}


@pytest.mark.parametrize("roles", [[E, PD], [ENCODES]], ids=["e_pd", "agg"])
async def test_what_is_an_items_own_fault_fails_each_request_that_wants_it(cluster: Cluster, roles: list[Any]) -> None:
    workers = [await cluster.worker(f"w@{at}", one) for at, one in enumerate(roles)]
    for one in workers:
        one.engine.renderer.refused.add(identity(1))
    first, last = workers[0].engine.renderer, workers[-1]
    first.gate.clear()
    refs = [await cluster.api.ref(1, f"part {at}") for at in range(10)]
    good = await cluster.api.prompt(1)
    prompts = [good.model_copy(update={"media": [ref]}) for ref in refs]
    asking = [asyncio.create_task(cluster.ask(last, prompt=prompt)) for prompt in prompts]
    await until(lambda: last.counts.waited == 10 - (len(roles) == 1), "all to wait")
    first.gate.set()
    errors: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
    assert [(one.status, one.code, one.param) for one in errors] == [
        (400, "invalid_media", f"part {at}") for at in range(10)
    ]
    assert sum(isinstance(one, RemoteFailure) for one in errors) == 10 - (len(roles) == 1)
    assert sum(one.engine.renderer.calls[identity(1)] for one in workers) == 1, "tried once"
    await cluster.ask(last, 2)
    await cluster.quiet()


async def test_a_prompt_of_text_needs_nothing(cluster: Cluster) -> None:
    pd = await cluster.worker("pd@0", PD)
    prompt = Prompt(token_ids=[1, 2, 3], cache_salt="s")
    async with pd.host.prompts.ready(decode_task("r"), prompt) as ready:
        assert (ready.prompt.token_ids, ready.prompt.items, ready.prompt.cache_salt) == ([1, 2, 3], [], "s")
        assert ready.engine_input["prompt_token_ids"] == [1, 2, 3]
        assert pd.leftovers() == {}
        await ready.encoded()
    with pytest.raises(PromptTooLong):
        await pd.answer(Prompt(token_ids=[1] * CONTEXT))


async def test_a_model_whose_items_depend_on_each_other_has_its_prompts_rendered_whole(cluster: Cluster) -> None:
    encode = await cluster.worker("encode@0", E, splices=False)
    pd = await cluster.worker("pd@0", PD, splices=False)
    prompt = await cluster.api.prompt(1, 2, 1)
    await cluster.ask(pd, prompt=prompt)
    assert pd.engine.renderer.wholes == [prompt]
    assert pd.items.prompts.rendered_whole == 1
    assert pd.items.plane.counts.mapped == 2, "each medium is read once"
    assert pd.engine.encodes == {identity(1): 2, identity(2): 1} and not encode.engine.encodes
    async with pd.host.prompts.ready(decode_task("r"), prompt) as ready:
        assert [item.identity for item in ready.prompt.items] == [identity(1), identity(2), identity(1)]
        assert len(ready.prompt.token_ids) == len(ready.engine_input["prompt_token_ids"]) == 4 + 3 * (ROWS + 2)
    await cluster.quiet()


@pytest.mark.parametrize("splices", [True, False])
async def test_an_item_of_too_many_tokens_is_refused_however_it_is_rendered(cluster: Cluster, splices: bool) -> None:
    agg = await cluster.worker("agg@0", ENCODES, splices=splices)
    agg.engine.renderer.large[identity(2)] = agg.settings.media.max_item_tokens + 1
    with pytest.raises(MediaRefused, match=r"media\.max_item_tokens") as caught:
        await cluster.ask(agg, 1, 2, 3)
    assert caught.value.param == "messages[0].content[1]"
    assert not agg.engine.encodes[identity(2)]
    await cluster.quiet()


async def test_an_item_without_a_rendering_of_its_own_has_its_prompt_rendered_whole(cluster: Cluster) -> None:
    encode, pd = await cluster.worker("encode@0", E), await cluster.worker("pd@0", PD)
    for one in (encode, pd):
        one.engine.renderer.odd.add(identity(2))
    await cluster.ask(pd, 1, 2)
    assert (pd.items.prompts.rendered_whole, len(pd.engine.renderer.wholes)) == (1, 1)
    assert pd.engine.encodes[identity(2)] == 1
    await cluster.ask(pd, 1)
    assert pd.items.prompts.rendered_whole == 1
    await cluster.quiet()


@pytest.fixture
async def agg(cluster: Cluster) -> Worker:
    return await cluster.worker("agg@0", ENCODES)


async def test_a_prompt_that_its_items_make_too_long(cluster: Cluster, agg: Worker) -> None:
    with pytest.raises(PromptTooLong):
        await cluster.ask(agg, *range(CONTEXT // (ROWS + 2)))
    await cluster.quiet()


async def test_a_prompt_without_a_place_for_an_item(cluster: Cluster, agg: Worker) -> None:
    prompt = await cluster.api.prompt(1, 2)
    with pytest.raises(InvalidRequest) as caught:
        await cluster.ask(agg, prompt=prompt.model_copy(update={"token_ids": [1, TARGET, 2]}))
    assert caught.value.param == "messages[0].content[1]"
    await cluster.quiet()


async def test_a_held_item_stays_until_its_prompt_is_over(cluster: Cluster) -> None:
    agg = await cluster.worker("agg@0", ENCODES, room=2)
    await cluster.ask(agg, 1)
    with pytest.raises(ZeroDivisionError):
        async with agg.host.prompts.ready(decode_task("r"), await cluster.api.prompt(1)) as ready:
            for other in range(10, 14):
                await cluster.ask(agg, other)
            assert agg.store.has(identity(1)) and agg.store.counts.evictions == 3
            await agg.engine.run(ready.engine_input)
            raise ZeroDivisionError
    await cluster.quiet()
    for other in range(14, 16):
        await cluster.ask(agg, other)
    assert not agg.store.has(identity(1))
    await cluster.quiet()
    assert await cluster.holders(1) == await cluster.holders(13) == set()
    assert await cluster.holders(15) == {"agg@0"}


async def test_what_is_being_encoded_here_is_waited_for_although_another_has_it_by_now(cluster: Cluster) -> None:
    agg, other = [await cluster.worker(f"agg@{at}", ENCODES) for at in range(2)]
    agg.engine.gate.clear()
    first = asyncio.create_task(cluster.ask(agg, 1))
    await until(lambda: agg.engine.at_the_gate, "the encode")
    own = await other.items.encoder.prepare(await cluster.api.ref(1))
    with other.items.encoder.arrivals.arrival() as arrival:
        async with other.items.encoder.reserving(own, arrival, 1):
            await other.engine.run(own.alone)
            await other.items.encoder.announce(own)
    second = asyncio.create_task(cluster.ask(agg, 1))
    await until(lambda: agg.counts.waited, "the second to wait")
    agg.engine.gate.set()
    await asyncio.gather(first, second)
    assert agg.engine.encodes == {identity(1): 1}
    assert (agg.counts.no_room, agg.counts.encoded_here, agg.local.counts.fetched) == (0, 1, 0)
    await cluster.quiet()


async def test_metrics_tell_what_became_of_items(cluster: Cluster) -> None:
    await cluster.worker("encode@0", E)
    pd = await cluster.worker("pd@0", PD)
    await cluster.ask(pd, 1)
    await cluster.ask(pd, 1)
    samples = {
        (one.name, one.labels.get("event")): one.value for family in pd.registry.collect() for one in family.samples
    }
    assert samples[("trivet_items_total", "here")] == samples[("trivet_items_total", "waited")] == 1
    assert samples[("trivet_item_fetches_total", "fetched")] == 1
    assert samples[("trivet_prompts_whole_total", "rendered")] == 0
    # One of the self-check, which is gone again.
    assert samples[("trivet_embedding_cache_total", "stored")] == 2
    assert samples[("trivet_tensor_plane_total", "mapped")] == 1
    assert samples[("trivet_embedding_cache_bytes", None)] == pd.store.size == ITEM
    assert not any(name.startswith("trivet_tensor_plane_failures") for name, _ in samples)
    await cluster.quiet()


@pytest.mark.parametrize("broken", ["nothing saved", "no room", "other rows"])
async def test_an_encoder_that_does_not_work(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """It keeps a worker that only encodes from starting; one that prefills lets vLLM render its prompts."""

    def engine(folder: Any) -> FakeEngine:
        made = FakeEngine(folder)
        made.saves = broken != "nothing saved"
        if broken == "other rows":
            made.renderer.large["self-check-image"] = 5
            monkeypatch.setattr(item_engine, "embedding", lambda of, rows: torch_rows(rows - 1))
        return made

    monkeypatch.setattr(item_cluster, "FakeEngine", engine)
    with pytest.raises(EncoderBroken):
        await cluster.worker("encode@0", E, room=0.9 if broken == "no room" else 2)
    left = [path for path in cluster.root.rglob("*") if "encode" in path.name]
    assert left == []
    agg = await cluster.worker("agg@0", ENCODES, room=0.9 if broken == "no room" else 2)
    assert not agg.host.record().spliceable
    await cluster.ask(agg, 1)
    assert agg.items.prompts.rendered_whole == 1
    await cluster.quiet()


def torch_rows(rows: int) -> Any:
    import torch

    return torch.zeros(rows, WIDTH)
