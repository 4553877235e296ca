"""workers.kv_budget: promises kept."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.roles import Role
from app.settings import Settings
from app.settings_sections import WorkerSettings
from workers import kv_budget
from workers.kv_budget import UNBOUNDED, KVBudget

BLOCK = 16


async def turns(number: int = 3) -> None:
    """Let everything that can go on, go on."""
    for _ in range(number):
        await asyncio.sleep(0)


@dataclass
class Holder:
    """A request: holds its blocks until told to leave."""

    tokens: int
    task: asyncio.Task[None]
    leave: asyncio.Event
    inside: bool = False


def hold(budget: KVBudget, tokens: int) -> Holder:
    holder: Holder
    leave = asyncio.Event()

    async def run() -> None:
        async with budget.reserve(tokens):
            holder.inside = True
            try:
                await leave.wait()
            finally:
                holder.inside = False

    holder = Holder(tokens, asyncio.create_task(run()), leave)
    return holder


async def finish(holders: list[Holder]) -> None:
    for holder in holders:
        holder.leave.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*(holder.task for holder in holders), return_exceptions=True)


def blocks(budget: KVBudget, tokens: int) -> int:
    return min(budget.capacity, -(-tokens // BLOCK))


def test_one_block_is_the_engines() -> None:
    assert KVBudget(160, BLOCK).capacity == 9
    assert KVBudget(167, BLOCK).capacity == 9
    assert KVBudget(0, BLOCK).capacity == 0


async def test_parts_of_a_block_count_whole() -> None:
    budget = KVBudget(BLOCK * 11, BLOCK)
    async with budget.reserve(17):
        assert budget.free == 8
    async with budget.reserve(16):
        assert budget.free == 9
    assert budget.free == 10


async def test_more_than_the_cache_gets_all_of_it_and_ends() -> None:
    budget = KVBudget(BLOCK * 11, BLOCK)
    async with asyncio.timeout(5), budget.reserve(10**9):
        assert budget.free == 0
    assert budget.free == 10


async def test_the_last_block_is_given_once() -> None:
    budget = KVBudget(BLOCK * 11, BLOCK)
    most, last, none_left = hold(budget, 9 * BLOCK), hold(budget, 1), hold(budget, 1)
    await turns()
    assert (most.inside, last.inside, none_left.inside, budget.free) == (True, True, False, 0)
    await finish([most, last, none_left])


async def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    budget = KVBudget(BLOCK * 11, BLOCK)
    first, large, small = hold(budget, 6 * BLOCK), hold(budget, 8 * BLOCK), hold(budget, 1 * BLOCK)
    await turns()
    assert (first.inside, large.inside, small.inside) == (True, False, False)
    assert budget.waits == 2
    first.leave.set()
    await turns()
    assert (large.inside, small.inside) == (True, True)
    await finish([first, large, small])
    assert budget.free == budget.capacity


async def test_one_that_leaves_the_queue_lets_the_next_through() -> None:
    budget = KVBudget(BLOCK * 11, BLOCK)
    first, large, small = hold(budget, 6 * BLOCK), hold(budget, 8 * BLOCK), hold(budget, 4 * BLOCK)
    await turns()
    large.task.cancel()
    await turns()
    assert small.inside and large.task.cancelled()
    await finish([first, small])
    assert budget.free == budget.capacity


async def test_cancelled_in_the_very_moment_of_its_turn() -> None:
    """Served and cancelled before it runs again: what it was given must come back."""
    budget = KVBudget(BLOCK * 11, BLOCK)
    first, second = hold(budget, 10 * BLOCK), hold(budget, 10 * BLOCK)
    await turns()
    await finish([first])
    budget._serve()
    second.task.cancel()
    await turns()
    assert not second.inside and budget.free == budget.capacity


async def test_an_error_inside_gives_the_blocks_back() -> None:
    budget = KVBudget(BLOCK * 11, BLOCK)
    with pytest.raises(ValueError):
        async with budget.reserve(5):
            raise ValueError
    assert budget.free == budget.capacity


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "hold", "turn", "leave", "cancel"]), st.integers(0, 6 * BLOCK), st.integers(0, 20)
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=200)
@given(STEPS, st.integers(0, 12))
def test_never_more_than_there_is_and_nobody_overtakes(steps: list[tuple[str, int, int]], total: int) -> None:
    asyncio.run(run_steps(steps, KVBudget(total * BLOCK, BLOCK)))


async def run_steps(steps: list[tuple[str, int, int]], budget: KVBudget) -> None:
    holders: list[Holder] = []
    for action, tokens, pick in steps:
        if action == "hold":
            holders.append(hold(budget, tokens))
        elif holders and action in ("leave", "cancel"):
            chosen = holders[pick % len(holders)]
            chosen.leave.set() if action == "leave" else chosen.task.cancel()
        else:
            await turns(1 + pick % 4)
        check(budget, holders)
    await turns(10)
    check(budget, holders)
    waiting = [one for one in holders if not one.task.done() and not one.inside]
    if waiting:
        assert blocks(budget, waiting[0].tokens) > budget.free, "the first in the queue waits though there is room"
    await finish(holders)
    assert budget.free == budget.capacity and not budget._queue


def check(budget: KVBudget, holders: list[Holder]) -> None:
    held = sum(blocks(budget, one.tokens) for one in holders if one.inside)
    assert budget.free >= 0 and held + budget.free <= budget.capacity
    alive = [one for one in holders if not one.task.done() and not one.task.cancelling() and not one.leave.is_set()]
    entered = [one.inside for one in alive]
    promised = budget.capacity - budget.free
    assert held <= promised
    # Those inside came before those that wait, except that one just served has yet to run.
    assert entered == sorted(entered, reverse=True) or promised > held


@pytest.mark.parametrize(
    ("media", "roles", "tokens"),
    [
        (True, {Role.DECODE}, 160),
        (False, {Role.DECODE}, UNBOUNDED),
        (True, {Role.PREFILL, Role.DECODE}, UNBOUNDED),
        (True, {Role.ENCODE}, UNBOUNDED),
    ],
)
def test_requests_wait_where_none_can_be_preempted(media: bool, roles: set[Role], tokens: int) -> None:
    chosen = Settings(model="m", enable_multimodal=media, worker=WorkerSettings(roles=frozenset(roles)))
    engine: Any = SimpleNamespace(kv_tokens=160, block_size=BLOCK, max_model_len=80)
    assert kv_budget.of(chosen, engine).capacity == KVBudget(tokens, BLOCK).capacity
