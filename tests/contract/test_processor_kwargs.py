"""A request's own `mm_processor_kwargs`: vLLM's processor gets them, and our names of media stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

SMALL = {"size": {"shortest_edge": 1024, "longest_edge": 64 * 64}}


@pytest.fixture(scope="module")
def renderer(vllm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.contract.test_item_records import QWEN3_VL, load

    made = load(QWEN3_VL, tmp_path_factory.mktemp("models"))
    yield made
    made.shutdown()


@pytest.mark.filterwarnings("ignore:Passing .min_pixels.:FutureWarning")  # vLLM does so
async def test_an_item_alone_and_in_a_prompt(renderer: Any) -> None:
    from workers import item_rendering, rendered

    picture, name = Image.new("RGB", (256, 256)), "a" * 32
    plain = await item_rendering.render_item(renderer, "image", picture, name)
    small = await item_rendering.render_item(renderer, "image", picture, name, SMALL)
    assert small.embeds < plain.embeds
    tokens = [5, *item_rendering.placeholder_tokens(renderer, "image"), 6]
    whole = await item_rendering.render(renderer, tokens, [("image", picture, name)], SMALL)
    (item,) = rendered.without_pixels(whole).items
    assert (item.identity, small.engine_input["mm_hashes"]) == (name, {"image": [name]})
    assert item.length == len(small.replacement) and item.fields == small.fields
