"""app.items.splice: items go where vLLM would put them. That vLLM does so too is the contract tests' business."""

import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors.requests import InvalidRequest
from app.items import ItemRecord, splice
from app.items.splice import expanded, runs_of
from app.messages.media import MediaRef, Modality
from app.messages.prompts import FieldValue, Prompt, RenderedPrompt

IMAGE, VIDEO, START, END = 900, 901, 902, 903
TARGETS: dict[Modality, list[int]] = {"image": [IMAGE], "video": [VIDEO]}


def name(number: int) -> str:
    return f"{number:032x}"


def ref(number: int, modality: Modality = "image") -> MediaRef:
    """Where the bytes lie is nothing to splicing."""
    return MediaRef.model_construct(
        modality=modality, identity=name(number), param=f"messages.0.content.{number}", size=1, source=None
    )


def record(
    number: int, replacement: list[int], modality: Modality = "image", target: list[int] | None = None, **more: Any
) -> ItemRecord:
    return ItemRecord(
        modality=modality,
        identity=name(number),
        target=TARGETS[modality] if target is None else target,
        replacement=runs_of(replacement),
        embeds=len(replacement),
        width=8,
        dtype="float32",
        model="m",
        worker="w",
        written=1.0,
        **{"fields": {}, **more},
    )


def known(*records: ItemRecord) -> dict[str, ItemRecord]:
    return {one.identity: one for one in records}


def places(prompt: RenderedPrompt) -> list[tuple[int, int, int]]:
    return [(int(item.identity, 16), item.offset, item.length) for item in prompt.items]


def test_an_item_takes_the_place_of_its_target() -> None:
    fields = {"grid": FieldValue(kind="batched", dtype="int64", shape=[3], data=[1, 2, 2])}
    one = record(1, [IMAGE] * 3, embed_runs=[1, 2], fields=fields)
    out = splice(Prompt(token_ids=[5, IMAGE, 6], media=[ref(1)], cache_salt="salt"), known(one))
    assert out.token_ids == [5, IMAGE, IMAGE, IMAGE, 6] and out.cache_salt == "salt"
    (item,) = out.items
    assert (item.modality, item.identity, item.offset, item.length) == ("image", name(1), 1, 3)
    assert item.embed_runs == [1, 2] and item.fields == fields


def test_text_stays_text() -> None:
    assert splice(Prompt(token_ids=[5, IMAGE, 6]), {}) == RenderedPrompt(token_ids=[5, IMAGE, 6])


def test_items_of_a_modality_are_placed_in_order_whatever_stands_between() -> None:
    records = known(
        record(1, [IMAGE] * 2), record(2, [IMAGE] * 4), record(3, [START, VIDEO, VIDEO, END, START, VIDEO], "video")
    )
    prompt = Prompt(token_ids=[IMAGE, VIDEO, 5, IMAGE, IMAGE, 6], media=[ref(1), ref(2), ref(3, "video"), ref(1)])
    out = splice(prompt, records)
    assert places(out) == [(1, 0, 2), (3, 2, 6), (2, 9, 4), (1, 13, 2)]
    assert out.token_ids == [IMAGE] * 2 + [START, VIDEO, VIDEO, END, START, VIDEO, 5] + [IMAGE] * 6 + [6]


def test_a_replacement_is_not_searched_again() -> None:
    records = known(record(1, [IMAGE, VIDEO, IMAGE]), record(2, [7], "video"))
    out = splice(Prompt(token_ids=[IMAGE, 5, VIDEO, IMAGE], media=[ref(1), ref(2, "video")]), records)
    assert places(out) == [(1, 0, 3), (2, 4, 1)]
    assert out.token_ids == [IMAGE, VIDEO, IMAGE, 5, 7, IMAGE]


def test_a_target_of_several_tokens_needs_all_of_them() -> None:
    one = record(1, [7, 7], target=[START, IMAGE, END])
    prompt = Prompt(token_ids=[START, IMAGE, START, START, IMAGE, END, START, IMAGE], media=[ref(1)])
    out = splice(prompt, known(one))
    assert out.token_ids == [START, IMAGE, START, 7, 7, START, IMAGE]


def test_of_two_targets_at_one_place_the_shorter_wins() -> None:
    long, short = record(1, [7], target=[START, IMAGE]), record(2, [8], "video", target=[START])
    out = splice(Prompt(token_ids=[START, IMAGE, START, IMAGE], media=[ref(1), ref(2, "video")]), known(long, short))
    assert out.token_ids == [8, IMAGE, 7]


def test_of_two_modalities_with_one_target_the_first_in_the_prompt_goes_first() -> None:
    media = [ref(1), ref(2, "video"), ref(3)]
    records = known(record(1, [7]), record(2, [8], "video", target=[IMAGE]), record(3, [9]))
    out = splice(Prompt(token_ids=[IMAGE, IMAGE, IMAGE], media=media), records)
    assert out.token_ids == [7, 9, 8]


def test_one_more_placeholder_than_items_stays() -> None:
    out = splice(Prompt(token_ids=[IMAGE, 5, IMAGE], media=[ref(1)]), known(record(1, [7, 7])))
    assert out.token_ids == [7, 7, 5, IMAGE]


@pytest.mark.parametrize("tokens", [[5, IMAGE], [IMAGE, 5, VIDEO], [IMAGE]])
def test_an_item_without_a_place_is_named(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        splice(Prompt(token_ids=tokens, media=[ref(1), ref(2)]), known(record(1, [7]), record(2, [8])))
    assert refused.value.status == 400 and refused.value.param == "messages.0.content.2"
    assert "no place for this image" in refused.value.message


def test_an_item_without_a_record_is_no_item_without_a_place() -> None:
    with pytest.raises(KeyError):
        splice(Prompt(token_ids=[IMAGE, IMAGE], media=[ref(1), ref(2)]), known(record(1, [7])))


@given(st.lists(st.integers(0, 3), max_size=60))
def test_runs_are_the_tokens(tokens: list[int]) -> None:
    runs = runs_of(tokens)
    assert expanded(runs) == tokens
    assert all(one[0] != other[0] for one, other in zip(runs, runs[1:], strict=False))


@pytest.mark.parametrize("target", [[IMAGE], [START, IMAGE, END]])
def test_long_prompts_take_milliseconds(target: list[int]) -> None:
    words = random.Random(0)
    tokens = [token for _ in range(16) for token in [*(words.randrange(1000, 99999) for _ in range(6250)), *target]]
    records = known(*(record(number, [IMAGE] * 1024, target=target) for number in range(16)))
    prompt = Prompt(token_ids=tokens, media=[ref(number) for number in range(16)])
    took = []
    for _ in range(5):
        before = time.thread_time()
        out = splice(prompt, records)
        took.append(time.thread_time() - before)
    assert len(out.items) == 16 and len(out.token_ids) == 16 * (6250 + 1024)
    assert min(took) < 0.04
