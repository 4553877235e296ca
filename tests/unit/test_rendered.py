"""workers.rendered, with vLLM's own classes: what leaves one engine without its pixels arrives complete at another."""

import json
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.messages.prompts import RenderedPrompt

SIZES = [2, 3]  # patches of each of two pictures


@pytest.fixture(scope="module")
def rendered(vllm: ModuleType) -> ModuleType:
    from workers import rendered

    return rendered


@pytest.fixture
def hf_inputs(torch: Any) -> dict[str, Any]:
    """What a processor makes of two pictures: pixels, and everything else in every shape that it may have."""
    return {
        "pixel_values": torch.rand(5, 4),
        "flat_pixels": torch.rand(2, 3),
        "grid": torch.tensor([[1, 2, 2], [1, 4, 6]]),
        "number": torch.tensor([7, 8], dtype=torch.int32),
        "flags": torch.tensor([[True, False], [False, False]]),
        "mask": (torch.arange(3000) < torch.tensor([[1000], [3000]])).int(),
        "same": torch.full((2, 3, 4), True),
        "half": torch.tensor([[0.1, 1e-5], [65504.0, -2.0]], dtype=torch.float16),
        "brain": torch.tensor([0.1, -3e38], dtype=torch.bfloat16),
        "per_patch": torch.arange(10, dtype=torch.float64).reshape(5, 2) / 3,
        "per_column": torch.arange(10).reshape(2, 5),
        "shared": torch.tensor([0.25]),
        "seconds": [[0.5, 1.5], [2.0]],
        "fps": [2.0, 24.0],
        "count": [3, 4],
    }


@pytest.fixture
def given_input(vllm: ModuleType, torch: Any, hf_inputs: dict[str, Any]) -> Any:
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig as Config
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    columns = [(slice(None), slice(0, 2)), (slice(None), slice(2, 5))]
    kept = {name: Config.batched("image", keep_on_cpu=True) for name in ("grid", "number", "half", "brain")}
    kept |= {name: Config.batched("image", keep_on_cpu=True) for name in ("flags", "mask", "same")}
    kept |= {name: Config.batched("image", keep_on_cpu=True) for name in ("seconds", "fps", "count")}
    config = {
        "pixel_values": Config.flat_from_sizes("image", torch.tensor(SIZES)),
        "flat_pixels": Config.batched("image"),
        "per_patch": Config.flat_from_sizes("image", torch.tensor(SIZES), keep_on_cpu=True),
        "per_column": Config.flat("image", columns, dim=1, keep_on_cpu=True),
        "shared": Config.shared("image", 2, keep_on_cpu=True),
        **kept,
    }
    mask = torch.tensor([False, True, True, False, True, False])
    return mm_input(
        [1, 9, 9, 5, 9, 9, 9, 9, 9, 9, 2],
        MultiModalKwargsItems.from_hf_inputs(hf_inputs, config),
        {"image": ["a" * 32, "b" * 32]},
        {"image": [PlaceholderRange(1, 2), PlaceholderRange(4, 6, is_embed=mask)]},
        cache_salt="salt",
    )


def across(prompt: RenderedPrompt) -> RenderedPrompt:
    return RenderedPrompt.model_validate(json.loads(json.dumps(prompt.model_dump(mode="json"))))


def same(torch: Any, one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, list):
        return isinstance(two, list) and len(one) == len(two) and all(map(lambda a, b: same(torch, a, b), one, two))
    return type(one) is type(two) and bool(one == two)


def test_no_pixel_travels(rendered: ModuleType, given_input: Any, hf_inputs: dict[str, Any]) -> None:
    prompt = rendered.without_pixels(given_input)
    for item in prompt.items:
        assert set(item.fields) == set(hf_inputs) - {"pixel_values", "flat_pixels"}


def test_everything_else_arrives_as_it_was(
    rendered: ModuleType, torch: Any, given_input: Any, hf_inputs: dict[str, Any]
) -> None:
    back = rendered.engine_input(across(rendered.without_pixels(given_input)))
    assert back["type"] == "multimodal"
    for part in ("prompt_token_ids", "mm_hashes", "mm_placeholders", "cache_salt"):
        assert back[part] == given_input[part], part
    # The model gets what is in the items of a batch, joined: as it was joined before.
    before, after = given_input["mm_kwargs"].get_data(), back["mm_kwargs"].get_data()
    assert set(after) == set(hf_inputs) - {"pixel_values", "flat_pixels"}
    for name, value in after.items():
        assert same(torch, value, before[name]), name
    for old, new in zip(given_input["mm_kwargs"]["image"], back["mm_kwargs"]["image"], strict=True):
        for name, elem in new.items():
            assert elem.field.keep_on_cpu and same(torch, elem.data, old[name].data), name


def test_a_long_mask_is_short(rendered: ModuleType, given_input: Any) -> None:
    first, second = rendered.without_pixels(given_input).items
    assert (first.fields["mask"].data, first.fields["mask"].times) == ([1, 0], [1000, 2000])
    assert (second.fields["mask"].data, second.fields["mask"].times) == ([1], [3000])
    assert (first.fields["same"].data, first.fields["same"].times) == ([True], [12])
    assert first.fields["grid"].times is None


def test_zeros_of_both_signs_stay_what_they_are(rendered: ModuleType, torch: Any) -> None:
    zeros = torch.tensor([0.0, -0.0, -0.0, -0.0, -0.0])
    back = rendered._from_json(json.loads(json.dumps(rendered._to_json(zeros))))
    assert torch.equal(torch.signbit(back), torch.signbit(zeros))


def test_the_embed_mask_travels(rendered: ModuleType, torch: Any, given_input: Any) -> None:
    prompt = across(rendered.without_pixels(given_input))
    assert [item.embed_runs for item in prompt.items] == [None, [1, 2, 1, 1, 1]]
    first, second = rendered.engine_input(prompt)["mm_placeholders"]["image"]
    assert first.is_embed is None and first.get_num_embeds() == 2
    assert second.is_embed.dtype == torch.bool and second.get_num_embeds() == 3


def test_twice_is_once(rendered: ModuleType, given_input: Any) -> None:
    prompt = rendered.without_pixels(given_input)
    assert rendered.without_pixels(rendered.engine_input(prompt)) == prompt


def test_items_are_in_the_prompts_order(rendered: ModuleType, given_input: Any) -> None:
    swapped = dict(given_input)
    for part in ("mm_hashes", "mm_placeholders"):
        swapped[part] = {"image": given_input[part]["image"][::-1]}
    swapped["mm_kwargs"] = {"image": list(given_input["mm_kwargs"]["image"])[::-1]}
    assert rendered.without_pixels(swapped) == rendered.without_pixels(given_input)


def test_text_is_text(rendered: ModuleType) -> None:
    from vllm.inputs import tokens_input

    text = tokens_input([1, 2, 3], cache_salt="salt")
    prompt = rendered.without_pixels(text)
    assert prompt == RenderedPrompt(token_ids=[1, 2, 3], cache_salt="salt")
    assert rendered.engine_input(across(prompt)) == text
    assert rendered.media_tokens(text) == {}


def test_media_tokens_are_the_placeholders(rendered: ModuleType, given_input: Any) -> None:
    assert rendered.media_tokens(given_input) == {"image": 8}


@given(st.lists(st.booleans(), min_size=1, max_size=50))
def test_runs_are_the_mask(rendered: ModuleType, mask: list[bool]) -> None:
    runs = rendered._runs(mask)
    assert rendered._mask(runs).tolist() == mask
    assert all(run > 0 for run in runs[1:]) and sum(runs) == len(mask)


def alone(torch: Any, data: Any) -> Any:
    """One item with one field that is kept."""
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    kept = MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=True))
    pixels = MultiModalFieldElem(data=torch.zeros(3), field=MultiModalBatchedField())
    items = MultiModalKwargsItems({"image": [MultiModalKwargsItem({"pixels": pixels, "kept": kept})]})
    return mm_input([9, 9], items, {"image": ["a" * 32]}, {"image": [PlaceholderRange(0, 2)]})


def travelled(rendered: ModuleType, torch: Any, data: Any) -> Any:
    back = rendered.engine_input(across(rendered.without_pixels(alone(torch, data))))
    return back["mm_kwargs"]["image"][0]["kept"].data


def test_lists_of_tensors_arrive_as_they_were(rendered: ModuleType, torch: Any) -> None:
    data = [
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        torch.tensor(2**62 + 1),
        [torch.zeros(0, 3), torch.tensor([True]), [1, 2.0, False]],
    ]
    assert same(torch, travelled(rendered, torch, data), data)


@pytest.mark.parametrize(
    "data, arrives",
    [
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.float64(2.0), 2.0),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (True, True),
        ((0.1, 1), [0.1, 1]),
        ([], []),
    ],
)
def test_numbers_arrive_as_numbers(rendered: ModuleType, torch: Any, data: Any, arrives: Any) -> None:
    assert same(torch, travelled(rendered, torch, data), arrives)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "uint8", "bool"])
def test_large_fields_stay_exact(rendered: ModuleType, torch: Any, dtype: str) -> None:
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=random)
    wanted = getattr(torch, dtype)
    data = (bits % 2 == 0) if dtype == "bool" else bits.view(wanted).reshape(-1, 4)
    back = travelled(rendered, torch, data)
    assert back.dtype == wanted and back.shape == data.shape
    if data.is_floating_point():
        # Bit by bit, but for the payload of what is not a number.
        assert bool(data.isnan().any()) and torch.equal(back.isnan(), data.isnan())
        back, data = back.nan_to_num(nan=0.0, posinf=math.inf), data.nan_to_num(nan=0.0, posinf=math.inf)
        back, data = back.view(torch.uint8), data.view(torch.uint8)
    assert torch.equal(back, data)


def test_infinities_arrive(rendered: ModuleType, torch: Any) -> None:
    data = torch.tensor([1.5, math.inf, -math.inf, -0.0])
    back = travelled(rendered, torch, data)
    assert torch.equal(back, data) and math.copysign(1, back[3]) == -1


@pytest.mark.parametrize("data", ["text", [object()], None, math.nan, [math.inf]])
def test_what_has_no_json_form_is_refused(rendered: ModuleType, torch: Any, data: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="a processor output"):
        rendered.without_pixels(alone(torch, data))


def test_an_item_with_pixels_comes_whole(rendered: ModuleType, given_input: Any) -> None:
    prompt = rendered.without_pixels(given_input)
    first, second = given_input["mm_kwargs"]["image"]
    back = rendered.engine_input(prompt, {"b" * 32: second, "c" * 32: first})
    assert list(back["mm_kwargs"]["image"][0]) == list(prompt.items[0].fields)
    assert back["mm_kwargs"]["image"][1] is second
    assert back["mm_placeholders"] == given_input["mm_placeholders"]


def test_one_item_twice_comes_whole_twice(rendered: ModuleType, given_input: Any) -> None:
    twice = dict(given_input, mm_hashes={"image": ["a" * 32, "a" * 32]})
    item = given_input["mm_kwargs"]["image"][0]
    back = rendered.engine_input(rendered.without_pixels(twice), {"a" * 32: item})
    assert all(one is item for one in back["mm_kwargs"]["image"])
    assert back["mm_hashes"] == twice["mm_hashes"]
