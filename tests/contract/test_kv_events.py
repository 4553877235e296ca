"""What vLLM does with KV events, and what Trivet relies on of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.blocks import Span, chain, extend
from app.settings import SettingsError
from tests.kv_publisher import Publisher
from workers.kv_events import sources, wire
from workers.kv_events.subscription import Source, Subscription

pytestmark = pytest.mark.usefixtures("vllm")

BLOCK = 16


# --- events -----------------------------------------------------------------------------------------------------------


def test_events_are_read_as_they_are_written() -> None:
    from vllm.distributed import kv_events as theirs

    stored = theirs.BlockStored(
        block_hashes=[2**64 - 1, b"x" * 32],
        parent_block_hash=5,
        token_ids=list(range(2 * BLOCK)),
        block_size=BLOCK,
        lora_id=1,
        medium=theirs.MEDIUM_GPU,
        lora_name="ad",
        extra_keys=[("ad", ("pic", -3), "salt"), None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="s",
    )
    removed = theirs.BlockRemoved(block_hashes=[7], medium="CPU", group_idx=2)
    batch = theirs.KVEventBatch(ts=1.5, events=[stored, removed, theirs.AllBlocksCleared()], data_parallel_rank=3)
    read = wire.decode(msgspec.msgpack.encode(batch))
    assert (read.ts, read.data_parallel_rank) == (1.5, 3)
    one, two, three = read.events
    assert isinstance(one, wire.Stored) and isinstance(two, wire.Removed) and isinstance(three, wire.Cleared)
    for name in wire.Stored.__struct_fields__:
        if name != "extra_keys":
            assert getattr(one, name) == getattr(stored, name), name
    assert one.extra_keys == [["ad", ["pic", -3], "salt"], None]
    assert (two.block_hashes, two.medium, two.group_idx) == ([7], "CPU", 2)
    assert wire.MAIN_MEDIUM == theirs.MEDIUM_GPU


def test_the_kinds_of_layers_are_vllms() -> None:
    from vllm.v1.kv_cache_interface import KVCacheSpecKind

    from workers.kv_events.ledger import FULL_ATTENTION

    assert {kind.value for kind in KVCacheSpecKind} >= FULL_ATTENTION


# --- what a block's name is made of -----------------------------------------------------------------------------------


@st.composite
def placed(draw: st.DrawFn) -> tuple[int, list[Span]]:
    """(tokens, items), which may overlap: models that interleave audio and video have such."""
    tokens = draw(st.integers(1, 6 * BLOCK))
    starts = draw(st.lists(st.integers(0, tokens - 1), max_size=5))
    return tokens, [Span(f"i{n}", at, draw(st.integers(1, tokens - at))) for n, at in enumerate(sorted(starts))]


@given(placed())
def test_items_lie_in_the_blocks_that_vllm_counts(prompt: tuple[int, list[Span]]) -> None:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    tokens, items = prompt
    features = [Plain(identifier=i.identity, mm_position=Plain(offset=i.offset, length=i.length)) for i in items]
    request = Plain(mm_features=features, lora_request=None, cache_salt=None, prompt_embeds=None)
    starts = range(0, tokens - BLOCK + 1, BLOCK)
    keys = [generate_block_hash_extra_keys(request, at, at + BLOCK, 0)[0] for at in starts]
    from_events = [list(block or ()) for block in to_event_extra_keys(keys) or ()]
    ids = list(range(tokens))
    assert chain(ids, BLOCK, items=items) == extend(None, ids, BLOCK, from_events)


# --- the pool of blocks -----------------------------------------------------------------------------------------------


def test_vllm_tells_of_each_copy_of_a_block(vllm: Any) -> None:
    """Two requests that prefill one prompt at once: two blocks of one hash, stored twice and removed twice."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    pool = BlockPool(3, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    hasher = get_request_block_hasher(BLOCK, sha256)
    for name in "ab":
        request = Request(name, list(range(BLOCK)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
        blocks = pool.get_new_blocks(1)
        pool.cache_full_blocks(request, blocks, 0, 1, BLOCK, 0)
        pool.free_blocks(blocks)
    pool.get_new_blocks(2)
    events = pool.take_events()
    assert [type(event).__name__ for event in events] == ["BlockStored"] * 2 + ["BlockRemoved"] * 2
    assert len({block for event in events for block in event.block_hashes}) == 1


def test_a_request_can_ask_for_a_report_of_what_it_finds() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from workers.engine import REPORT

    params = SamplingParams(max_tokens=1, extra_args={REPORT: "full"})
    assert Request("r", [1], params, None).kv_cache_report_mode == "full"


# --- the publisher ----------------------------------------------------------------------------------------------------


@pytest.fixture
def publishers(tmp_path: Path) -> Iterator[Any]:
    made: list[Publisher] = []

    def one(**config: Any) -> Publisher:
        made.append(Publisher(tmp_path, **config))
        return made[-1]

    yield one
    for each in made:
        each.close()


class Listener:
    def __init__(self, source: Source, **limits: Any) -> None:
        self.subscription = Subscription(source, **{"replay_s": 5.0, "idle_s": 0.1, **limits})
        self.batches: AsyncIterator[Any] = self.subscription.batches()

    async def next(self, count: int = 1) -> list[float | None]:
        """The numbers of the next batches, None for what was lost."""
        async with asyncio.timeout(20):
            found = [await anext(self.batches) for _ in range(count)]
        return [None if one is None else one.ts for one in found]


@pytest.fixture
async def listen() -> AsyncIterator[Any]:
    made: list[Listener] = []

    def one(source: Source, **limits: Any) -> Listener:
        made.append(Listener(source, **limits))
        return made[-1]

    yield one
    for each in made:
        async with aclosing(each.batches):  # type: ignore[type-var]
            each.subscription.close()


async def test_everything_comes_in_order_from_the_first_batch_on(publishers: Any, listen: Any) -> None:
    publisher = publishers()
    publisher.send(count=3)
    publisher.flush()
    listener = listen(publisher.source)
    assert await listener.next(3) == [0, 1, 2], "what went out before anybody listened"
    publisher.send(count=50)
    assert await listener.next(50) == list(range(3, 53))
    assert listener.subscription.counts.lost == 0


async def test_what_got_lost_is_asked_for_again(publishers: Any, listen: Any) -> None:
    publisher = publishers()
    listener = listen(publisher.source, idle_s=30.0)
    before = await started(publisher, listener)
    publisher.lose(count=5)
    publisher.send()
    assert await listener.next(6) == list(range(before, before + 6))
    assert listener.subscription.counts.replayed >= 5 and listener.subscription.counts.lost == 0


async def started(publisher: Publisher, listener: Listener) -> int:
    """Publish until the subscription is in force; answers how many batches went out and came."""
    getting = asyncio.create_task(listener.next())
    while not getting.done():
        publisher.send()
        await asyncio.sleep(0.01)
    publisher.flush()
    last = await getting
    while last[-1] != publisher.sent - 1:
        last = await listener.next()
    return publisher.sent


async def test_a_lost_batch_that_nothing_follows_is_noticed_too(publishers: Any, listen: Any) -> None:
    publisher = publishers()
    publisher.lose(count=2)
    assert await listen(publisher.source).next(2) == [0, 1]


async def test_more_than_a_socket_holds_is_replayed_in_pieces(publishers: Any, listen: Any) -> None:
    publisher = publishers()
    publisher.lose(count=5000)
    assert await listen(publisher.source).next(5000) == list(range(5000))


async def test_what_is_kept_no_more_is_lost_and_said_to_be(publishers: Any, listen: Any) -> None:
    publisher = publishers(buffer_steps=4)
    publisher.lose(count=10)
    listener = listen(publisher.source)
    assert await listener.next(5) == [None, 6, 7, 8, 9]
    assert listener.subscription.counts.lost == 1


async def test_without_a_replay_a_gap_is_a_loss(publishers: Any, listen: Any) -> None:
    publisher = publishers()
    listener = listen(Source(publisher.source.endpoint))
    before = await started(publisher, listener)
    publisher.lose(count=3)
    publisher.send()
    assert await listener.next(2) == [None, before + 3]


async def test_a_batch_that_cannot_be_read_is_a_loss(publishers: Any, listen: Any) -> None:
    publisher = publishers()
    publisher.publisher._event_queue.put(["nonsense"])  # type: ignore[arg-type]
    publisher.send()
    assert await listen(publisher.source).next(2) == [None, 0]


async def test_ranks_publish_apart(publishers: Any, listen: Any) -> None:
    first, second = publishers(), publishers(rank=1)
    assert first.source.endpoint != second.source.endpoint
    first.send(count=1)
    second.send(count=2)
    assert await listen(second.source).next(2) == [0, 1]
    assert await listen(first.source).next(1) == [0]


# --- where it is published --------------------------------------------------------------------------------------------


def llm(endpoint: str, replay: str | None = None) -> Any:
    from vllm.config import KVEventsConfig

    made = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay, topic="kv")
    return Plain(get_kv_event_sources=lambda: {0: made})


def test_a_users_own_addresses_are_listened_to() -> None:
    assert sources.of(llm("tcp://*:5557", "tcp://*:5558")) == {
        0: Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv")
    }
    assert sources.of(llm("tcp://10.0.0.1:5557")) == {}, "there the engine calls, and somebody else listens"


def test_a_path_that_no_socket_can_have_names_the_setting() -> None:
    with pytest.raises(SettingsError, match=r"tensors\.directory"):
        sources.config(Path("/") / ("x" * 100))
