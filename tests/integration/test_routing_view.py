"""app.routing.view: the blocks that the router looks for are those of the prompt as an engine gets it."""

import random
from typing import Any

import pytest

from app.errors.requests import InvalidRequest
from app.items import splice
from app.items.index import ItemIndex
from app.messages.media import MediaRef
from app.messages.prompts import Prompt
from app.redis import connect
from app.registry import Fleet
from app.roles import Role
from app.routing.blocks import Span, chain
from app.routing.view import GUESS, Views
from app.settings_sections import ItemSettings
from tests.items import E0, MODEL, identity, publish, record
from tests.messages import AGG, ENGINE, media_ref, worker
from tests.redis_server import free_port

SIZE = 16
ONE, TWO, THREE = (identity(n) for n in range(3))
FLEET = Fleet(
    (
        worker(
            AGG,
            *Role,
            fingerprint=MODEL,
            placeholders={"image": [7]},
            engine=ENGINE.model_copy(update={"block_size": SIZE}),
        ),
    )
)
TEXT = [random.Random(0).randrange(100, 1000) for _ in range(200)]


@pytest.fixture
def index(redis: Any) -> ItemIndex:
    return ItemIndex(redis, MODEL, ItemSettings())


def prompt(*media: MediaRef, **changes: Any) -> Prompt:
    """Text, and after each 40 tokens of it the placeholder of a medium."""
    tokens: list[int] = []
    for number in range(len(media)):
        tokens += [*TEXT[40 * number : 40 * number + 40], 7]
    return Prompt(token_ids=tokens + TEXT[160:], media=list(media), **changes)


def engines(given: Prompt, *known: str, adapter: str = "") -> list[str]:
    """The chain of the prompt that a prefill worker's engine gets."""
    whole = splice(given, {one: record(one) for one in known})
    spans = [Span(item.identity, item.offset, item.length) for item in whole.items]
    return chain(whole.token_ids, SIZE, items=spans, adapter=adapter, salt=given.cache_salt or "")


async def test_text_is_seen_whole(index: ItemIndex) -> None:
    view = await Views(index).of(Prompt(token_ids=TEXT, cache_salt="mine"), FLEET, adapter="poet")
    assert view.blocks == tuple(chain(TEXT, SIZE, adapter="poet", salt="mine"))
    assert (view.tokens, view.exact) == (200, True)


async def test_items_with_records_are_seen_as_the_engine_sees_them(index: ItemIndex) -> None:
    for one in (ONE, TWO):
        await publish(index, E0, one)
    given = prompt(media_ref(ONE), media_ref(TWO), media_ref(ONE))
    views = Views(index)
    for _ in range(2):  # from Redis, and from memory
        view = await views.of(given, FLEET)
        assert view.blocks == tuple(engines(given, ONE, TWO)) and view.exact
        assert view.tokens == len(given.token_ids) + 3 * 65


async def test_the_order_of_pictures_matters_from_the_first_one_on(index: ItemIndex) -> None:
    for one in (ONE, TWO):
        await publish(index, E0, one)
    here = await Views(index).of(prompt(media_ref(ONE), media_ref(TWO)), FLEET)
    there = await Views(index).of(prompt(media_ref(TWO), media_ref(ONE)), FLEET)
    same = [mine == other for mine, other in zip(here.blocks, there.blocks, strict=True)]
    assert same == [True] * (40 // SIZE) + [False] * (len(same) - 40 // SIZE)


async def test_the_view_ends_before_the_first_item_that_nobody_has_seen(index: ItemIndex) -> None:
    await publish(index, E0, ONE)
    given = prompt(media_ref(ONE), media_ref(TWO), media_ref(ONE))
    view = await Views(index).of(given, FLEET)
    seen = (40 + 66 + 40) // SIZE
    assert view.blocks == tuple(engines(given, ONE, TWO)[:seen])
    assert not view.exact and view.tokens > len(given.token_ids) + 2 * 65


async def test_a_seen_item_counts_as_soon_as_it_is_seen(index: ItemIndex) -> None:
    views, given = Views(index), prompt(media_ref(THREE))
    before = await views.of(given, FLEET)
    assert before.blocks == tuple(engines(given, THREE)[: 40 // SIZE])
    assert before.tokens == len(given.token_ids) + GUESS
    await publish(index, E0, THREE)
    assert (await views.of(given, FLEET)).blocks == tuple(engines(given, THREE))


async def test_without_a_word_on_placeholders_only_seen_items_are_looked_at(index: ItemIndex) -> None:
    mute = Fleet(tuple(one.model_copy(update={"placeholders": {}}) for one in FLEET.workers))
    assert (await Views(index).of(prompt(media_ref(ONE)), mute)).blocks == ()
    await publish(index, E0, ONE)
    assert (await Views(index).of(prompt(media_ref(ONE)), mute)).blocks


async def test_the_forgotten_are_asked_for_again(index: ItemIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.routing.view.REMEMBERED", 1)
    for one in (ONE, TWO):
        await publish(index, E0, one)
    views, given = Views(index), prompt(media_ref(ONE), media_ref(TWO))
    expected = tuple(engines(given, ONE, TWO))
    assert [(await views.of(given, FLEET)).blocks for _ in range(2)] == [expected] * 2


async def test_a_prompt_without_a_place_for_its_picture_is_refused(index: ItemIndex) -> None:
    await publish(index, E0, ONE)
    with pytest.raises(InvalidRequest) as refused:
        await Views(index).of(Prompt(token_ids=TEXT, media=[media_ref(ONE)]), FLEET)
    assert refused.value.param == "messages[0].content[0].image_url"


async def test_a_redis_that_is_away_makes_items_unseen() -> None:
    away = connect(f"redis://127.0.0.1:{free_port()}/0", 1.0, name="away")
    view = await Views(ItemIndex(away, MODEL, ItemSettings())).of(prompt(media_ref(ONE)), FLEET)
    assert not view.exact and len(view.blocks) == 40 // SIZE
    await away.aclose()
