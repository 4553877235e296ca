"""Prompts made from item records are vLLM's own rendering of the whole, for each supported model family.

A family is one entry in FAMILIES. No engine runs: vLLM's renderer alone, on tiny models.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app import tiny_model, vllm_args
from app.errors.requests import InvalidRequest
from app.items import ItemRecord, splice
from app.items.splice import runs_of
from app.messages.media import MediaRef, Modality
from app.messages.prompts import Prompt, RenderedPrompt

Medium = tuple[Modality, Any]


def picture(width: int, height: int, seed: int = 0) -> Medium:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return "image", Image.fromarray(pixels)


def clip(frames: int, width: int, height: int, fps: float = 2.0, step: int = 1) -> Medium:
    """A video as vLLM's loader gives it: the frames that were sampled, and what they were sampled from."""
    pixels = np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    about = {
        "fps": fps,
        "total_num_frames": frames * step,
        "frames_indices": list(range(0, frames * step, step)),
        "duration": frames * step / fps,
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return "video", (pixels, about)


def sound(seconds: float, rate: int = 16_000, seed: int = 0) -> Medium:
    """As vLLM's loader gives it: samples at their own rate."""
    samples = np.random.default_rng(seed).uniform(-1, 1, round(seconds * rate)).astype(np.float32)
    return "audio", (samples, rate)


@dataclass(frozen=True)
class Family:
    """A tiny model's family, media of every kind that its processor tells apart, and special tokens for the text."""

    name: str
    media: Callable[[], list[Medium]]
    stray: tuple[str, ...]


def _qwen3_vl_media() -> list[Medium]:
    shapes = [(64, 64), (256, 256), (320, 96), (50, 333), (640, 480), (33, 34)]
    clips = [clip(4, 64, 64), clip(8, 96, 64), clip(5, 64, 130, fps=30.0, step=7), clip(7, 128, 64, fps=0.5)]
    return [picture(*shape) for shape in shapes] + [picture(64, 64, seed=1), *clips, clip(24, 64, 64, fps=23.976)]


def _sounds() -> list[Medium]:
    lengths = [sound(0.2), sound(1.0), sound(1.0, seed=1), sound(2.51), sound(12.3)]
    return [*lengths, sound(0.7, rate=44_100), sound(1.3, rate=8_000)]


def _llava_media() -> list[Medium]:
    return [picture(*shape) for shape in [(64, 64), (320, 96), (50, 333)]] + [picture(64, 64, seed=1)]


def _omni_media() -> list[Medium]:
    clips = [clip(4, 64, 64), clip(5, 64, 130, fps=30.0, step=7)]
    return [picture(64, 64), picture(320, 96), picture(64, 64, seed=1), *clips, *_sounds()[::2]]


TURN = "<|im_end|>\n<|im_start|>user\n"
QWEN3_VL = Family(
    "qwen3_vl",
    _qwen3_vl_media,
    ("<|vision_start|>", "<|vision_end|>", TURN, "<|image_pad|>", "<|video_pad|>"),
)
QWEN2_AUDIO = Family("qwen2_audio", _sounds, ("<|audio_bos|>", "<|audio_eos|>", TURN, "<|AUDIO|>"))
OMNI = Family(
    "qwen2_5_omni",
    _omni_media,
    ("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", TURN, "<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>"),
)
LLAVA = Family("llava", _llava_media, (TURN, "<image>"))
FAMILIES = [QWEN3_VL, QWEN2_AUDIO, OMNI, LLAVA]
TEXT = ("", "", " ", "\n", "Describe the video in detail.", " ünï ☃ 7", "<0.5 seconds>")


class Model:
    """A family's renderer, and the records of its media after a journey through JSON."""

    def __init__(self, family: Family, renderer: Any) -> None:
        from workers import item_rendering

        self.family, self.renderer, self.items = family, renderer, item_rendering
        self.media = {f"{at:032x}": medium for at, medium in enumerate(family.media())}
        self.alone = {identity: self.render_alone(identity) for identity in self.media}
        self.records = {identity: self._record(one) for identity, one in self.alone.items()}

    def render_alone(self, identity: str) -> Any:
        return asyncio.run(self.items.render_item(self.renderer, *self.media[identity], identity))

    def _record(self, alone: Any) -> ItemRecord:
        record = alone.record(width=128, dtype="float32", worker="encode@host", model="m")
        return ItemRecord.model_validate(json.loads(record.model_dump_json()))

    def prompt(self, words: list[str], identities: list[str], salt: str | None = None) -> Prompt:
        """Words and items in turn, the words first."""
        counts: dict[Modality, int] = {}
        text = words[0]
        for identity, word in zip(identities, words[1:], strict=True):
            modality, _ = self.media[identity]
            counts[modality] = counts.get(modality, 0) + 1
            text += self.items.placeholder(self.renderer, modality, counts[modality]) + word
        tokens = self.renderer.get_tokenizer().encode(text, add_special_tokens=False)
        media = [self._ref(identity) for identity in identities]
        return Prompt(token_ids=tokens, media=media, cache_salt=salt)

    def _ref(self, identity: str) -> MediaRef:
        """Where the bytes lie is nothing to rendering."""
        return MediaRef.model_construct(
            modality=self.media[identity][0], identity=identity, param=identity, size=1, source=None
        )

    def whole(self, prompt: Prompt) -> Any:
        items = [(ref.modality, self.media[ref.identity][1], ref.identity) for ref in prompt.media]
        return asyncio.run(self.items.render(self.renderer, prompt.token_ids, items))


def load(family: Family, folder: Path, flags: str = "", cache_gb: float = 0) -> Any:
    """vLLM's renderer for the family's tiny model."""
    from vllm.config import VllmConfig
    from vllm.renderers.registry import renderer_from_config

    from workers import audio_resampling

    given = vllm_args.split(f"--max-model-len 8192 --dtype float32 {flags}")
    args = vllm_args.parse(str(tiny_model.build(folder / family.name, family.name)), given)
    args.mm_processor_cache_gb = cache_gb
    renderer = renderer_from_config(VllmConfig(model_config=args.create_model_config()))
    audio_resampling.settle(renderer)
    return renderer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def model(vllm: Any, folder: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    renderer = load(request.param, folder)
    yield Model(request.param, renderer)
    renderer.shutdown()


def check_equal(torch: Any, ours: Any, whole: Any, *, pixels: bool) -> None:
    """vLLM's two inputs, compared without our own reading of them."""
    assert ours["type"] == whole["type"] == "multimodal"
    assert list(ours["prompt_token_ids"]) == list(whole["prompt_token_ids"])
    assert ours["mm_hashes"] == whole["mm_hashes"]
    assert ours["mm_placeholders"].keys() == whole["mm_placeholders"].keys()
    for modality, places in whole["mm_placeholders"].items():
        for mine, its in zip(ours["mm_placeholders"][modality], places, strict=True):
            assert (mine.offset, mine.length) == (its.offset, its.length)
            assert_same(torch, mine.is_embed, its.is_embed)
        for mine, its in zip(ours["mm_kwargs"][modality], whole["mm_kwargs"][modality], strict=True):
            assert mine.keys() == {key for key, elem in its.items() if pixels or elem.field.keep_on_cpu}
            for key, elem in mine.items():
                assert type(elem.field) is type(its[key].field) and elem.field.keep_on_cpu == its[key].field.keep_on_cpu
                assert_same(torch, elem.data, its[key].data)


def assert_same(torch: Any, mine: Any, its: Any) -> None:
    assert type(mine) is type(its)
    if isinstance(its, torch.Tensor):
        assert mine.dtype == its.dtype and mine.shape == its.shape and torch.equal(mine, its)
    elif isinstance(its, list):
        for one, other in zip(mine, its, strict=True):
            assert_same(torch, one, other)
    else:
        assert mine == its


def check(model: Model, prompt: Prompt) -> None:
    import torch

    from workers import rendered

    whole = model.whole(prompt)
    ours = RenderedPrompt.model_validate(json.loads(splice(prompt, model.records).model_dump_json()))
    without = rendered.without_pixels(whole).model_copy(update={"cache_salt": prompt.cache_salt})
    assert ours == without
    made = rendered.engine_input(ours)
    check_equal(torch, made, whole, pixels=False)
    assert made == rendered.engine_input(without)
    full = {identity: alone.kwargs for identity, alone in model.alone.items()}
    check_equal(torch, rendered.engine_input(ours, full), whole, pixels=True)


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_is_vllms_own_rendering(model: Model, seed: int) -> None:
    dice = random.Random(seed)
    identities = dice.choices(list(model.media), k=dice.randint(1, 8))
    words = [dice.choice(TEXT + model.family.stray) for _ in range(len(identities) + 1)]
    check(model, model.prompt(words, identities, salt=dice.choice([None, "salt"])))


def test_every_medium_is_itself_in_a_prompt_of_its_own(model: Model) -> None:
    for identity in model.media:
        check(model, model.prompt(["", ""], [identity]))
        check(model, model.prompt(["a", "b", "c"], [identity, identity]))


def test_all_media_side_by_side(model: Model) -> None:
    identities = list(model.media)
    for order in (identities, identities[::-1]):
        check(model, model.prompt([""] * (len(order) + 1), order))


def test_positions_are_the_same_without_the_media(model: Model) -> None:
    """By the model's own code: it sees what another worker's engine is given, and what this one's would be."""
    import torch
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    from workers import rendered

    its_class = get_model_cls(model.renderer.model_config)
    if not hasattr(its_class, "get_mrope_input_positions"):
        pytest.skip("positions are the tokens' own")
    config = model.renderer.model_config.hf_config
    engine_model = its_class.__new__(its_class)
    torch.nn.Module.__init__(engine_model)
    engine_model.config = getattr(config, "thinker_config", config)

    def positions(given: Any) -> Any:
        features = [
            MultiModalFeatureSpec(kwargs, modality, "", place)
            for modality, places in given["mm_placeholders"].items()
            for kwargs, place in zip(given["mm_kwargs"][modality], places, strict=True)
        ]
        features.sort(key=lambda feature: feature.mm_position.offset)
        return engine_model.get_mrope_input_positions(list(given["prompt_token_ids"]), features)

    prompt = model.prompt(["a"] * (len(model.media) + 1), list(model.media))
    ours, delta = positions(rendered.engine_input(splice(prompt, model.records)))
    whole, its_delta = positions(model.whole(prompt))
    assert ours.shape == (3, len(splice(prompt, model.records).token_ids))
    assert torch.equal(ours, whole) and delta == its_delta
    assert delta < 0, "a grid takes fewer positions than tokens"


def test_an_item_without_a_placeholder_is_refused_as_vllm_refuses_it(model: Model) -> None:
    for identity in model.media:
        prompt = model.prompt(["no ", "place"], [identity])
        prompt = prompt.model_copy(update={"media": [*prompt.media, *prompt.media]})
        with pytest.raises(InvalidRequest, match="has no place"):
            splice(prompt, model.records)
        with pytest.raises((ValueError, AssertionError, RuntimeError)):
            model.whole(prompt)


def test_the_record_counts_the_embeddings(model: Model) -> None:
    for identity, record in model.records.items():
        ((place,),) = model.alone[identity].engine_input["mm_placeholders"].values()
        assert record.embeds == place.get_num_embeds() > 0
        assert record.replacement == runs_of(model.alone[identity].replacement)


def test_an_item_that_the_processor_refuses_is_a_value_error(model: Model) -> None:
    if model.family is not QWEN3_VL:
        pytest.skip("what a processor refuses is its own")
    with pytest.raises(ValueError, match="Failed to apply") as refused:
        asyncio.run(model.items.render_item(model.renderer, *picture(1000, 2), "f" * 32))
    assert "aspect ratio" in str(refused.value.__cause__)


# Models that can be spliced, and some that cannot


@pytest.mark.parametrize(
    "allowed",
    [{"image": 1, "video": 1, "audio": 1}, {"image": 2, "video": 0, "audio": 2}, {"image": 999, "audio": 999}],
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_probing_keeps_to_what_a_prompt_may_hold(
    vllm: Any, folder: Path, family: Family, allowed: dict[str, int]
) -> None:
    from workers import item_rendering

    renderer = load(family, folder, f"--limit-mm-per-prompt '{json.dumps(allowed)}'")
    limits = item_rendering.limits(renderer)
    known = {modality for modality, _ in family.media()}
    assert limits.keys() <= known
    assert all(limits.get(modality, 0) == most for modality, most in allowed.items() if modality in known)
    assert await item_rendering.probe(renderer)
    renderer.shutdown()


async def test_vllms_cache_of_processed_items_changes_nothing(vllm: Any, folder: Path) -> None:
    """It may answer with an item that has no data, and with what it made of an item alone."""
    from workers import item_rendering

    renderer = load(QWEN3_VL, folder, cache_gb=1)
    for _ in range(2):
        alone = await item_rendering.render_item(renderer, *picture(64, 64), "a" * 32)
        assert alone.kwargs["pixel_values"].data is not None and alone.fields
        assert await item_rendering.probe(renderer)
    assert not await item_rendering.probe(Dependent(renderer, _wider))
    renderer.shutdown()


class Dependent:
    """A renderer whose second item of a modality comes out as `change` makes it, because there was a first one."""

    def __init__(self, renderer: Any, change: Callable[[Any, str], None]) -> None:
        self._renderer, self._change = renderer, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_cmpl_async(self, prompts: Any, **more: Any) -> list[Any]:
        made: list[Any] = await self._renderer.render_cmpl_async(prompts, **more)
        for one in made:
            for modality, places in one["mm_placeholders"].items():
                if len(places) > 1:
                    self._change(one, modality)
        return made


def _wider(made: Any, modality: str) -> None:
    """One more token."""
    places = made["mm_placeholders"][modality]
    end = places[1].offset + places[1].length
    made["prompt_token_ids"] = [*made["prompt_token_ids"][:end], 5, *made["prompt_token_ids"][end:]]
    places[1] = replace(places[1], length=places[1].length + 1, is_embed=None)


def _other_token(made: Any, modality: str) -> None:
    tokens = list(made["prompt_token_ids"])
    tokens[made["mm_placeholders"][modality][1].offset] = 5
    made["prompt_token_ids"] = tokens


def _other_mask(made: Any, modality: str) -> None:
    import torch

    places = made["mm_placeholders"][modality]
    places[1] = replace(places[1], is_embed=torch.arange(places[1].length) > 0)


def _other_value(made: Any, modality: str) -> None:
    elem = made["mm_kwargs"][modality][1][f"{modality}_grid_thw"]
    elem.data = elem.data + 1


def _other_dtype(made: Any, modality: str) -> None:
    elem = made["mm_kwargs"][modality][1][f"{modality}_grid_thw"]
    elem.data = elem.data.int()


def _one_field_less(made: Any, modality: str) -> None:
    del made["mm_kwargs"][modality][1][f"{modality}_grid_thw"]


def _swapped(made: Any, modality: str) -> None:
    for part in ("mm_hashes", "mm_kwargs"):
        items = list(made[part][modality])
        made[part][modality] = [items[1], items[0], *items[2:]]


CHANGES: Mapping[Callable[[Any, str], None], str] = {
    _wider: "length of item 1",
    _other_token: "token ids",
    _other_mask: "embed_runs of item 1",
    _other_value: "fields of item 1",
    _other_dtype: "fields of item 1",
    _one_field_less: "fields of item 1",
    _swapped: "identity of item 0",
}


@pytest.fixture(scope="module")
def qwen3_vl(vllm: Any, folder: Path) -> Iterator[Any]:
    renderer = load(QWEN3_VL, folder)
    yield renderer
    renderer.shutdown()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_items_that_depend_on_others_are_found(
    qwen3_vl: Any, change: Callable[[Any, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    from workers import item_rendering

    with caplog.at_level(logging.WARNING, logger="workers.item_rendering"):
        assert not await item_rendering.probe(Dependent(qwen3_vl, change))
    assert CHANGES[change] in caplog.text and "rendered whole" in caplog.text


async def test_only_the_modalities_that_are_asked_for_are_tried(qwen3_vl: Any) -> None:
    from workers import item_rendering

    def only_videos(made: Any, modality: str) -> None:
        if modality == "video":
            _wider(made, modality)

    assert await item_rendering.probe(Dependent(qwen3_vl, only_videos), ["image"])
    assert not await item_rendering.probe(Dependent(qwen3_vl, only_videos), ["video"])


class Around(Dependent):
    """A renderer that changes what stands around an item that is alone."""

    async def render_cmpl_async(self, prompts: Any, **more: Any) -> list[Any]:
        made: list[Any] = await self._renderer.render_cmpl_async(prompts, **more)
        for one in made:
            for modality in one["mm_placeholders"]:
                self._change(one, modality)
        return made


def _before(made: Any, modality: str) -> None:
    tokens = list(made["prompt_token_ids"])
    made["prompt_token_ids"] = [tokens[0] + 1, *tokens[1:]]


def _after(made: Any, modality: str) -> None:
    made["prompt_token_ids"] = [*made["prompt_token_ids"], 5]


def _nowhere(made: Any, modality: str) -> None:
    made["mm_placeholders"][modality].clear()


def _no_embeddings(made: Any, modality: str) -> None:
    import torch

    place = made["mm_placeholders"][modality][0]
    made["mm_placeholders"][modality][0] = replace(place, is_embed=torch.zeros(place.length, dtype=torch.bool))


def _unknown_output(made: Any, modality: str) -> None:
    made["mm_kwargs"][modality][0][f"{modality}_grid_thw"].data = "text"


def _error(made: Any, modality: str) -> None:
    raise ValueError("no picture, please")


@pytest.mark.parametrize("change", [_before, _after, _nowhere, _no_embeddings, _unknown_output])
async def test_items_that_cannot_be_rendered_alone_are_found(qwen3_vl: Any, change: Callable[[Any, str], None]) -> None:
    from workers import item_rendering

    with pytest.raises(item_rendering.NotSpliceable):
        await item_rendering.render_item(Around(qwen3_vl, change), *picture(64, 64), "a" * 32)
    assert not await item_rendering.probe(Around(qwen3_vl, change))


async def test_a_processor_that_fails_is_no_failed_start(qwen3_vl: Any, caplog: pytest.LogCaptureFixture) -> None:
    from workers import item_rendering

    with caplog.at_level(logging.WARNING, logger="workers.item_rendering"):
        assert not await item_rendering.probe(Around(qwen3_vl, _error))
    assert "no picture, please" in caplog.text


async def test_a_model_without_placeholder_is_found(qwen3_vl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader import get_model_cls

    from workers import item_rendering

    with pytest.raises(item_rendering.NotSpliceable, match="no placeholder for smell"):
        item_rendering.placeholder(qwen3_vl, "smell")  # type: ignore[arg-type]
    nothing = classmethod(lambda *_: None)
    monkeypatch.setattr(get_model_cls(qwen3_vl.model_config), "get_placeholder_str", nothing)
    assert not await item_rendering.probe(Around(qwen3_vl, lambda made, modality: None))


# vLLM's rule for who gets which placeholder


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.tuples(st.sampled_from(["image", "video"]), st.integers(0, 1)), max_size=6),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=2, max_size=2),
)
def test_items_find_their_places_as_in_vllm(
    vllm: Any, tokens: list[int], chosen: list[tuple[Modality, int]], targets: list[list[int]]
) -> None:
    from vllm.multimodal.processing import processor as its

    media, records = [], {}
    updates: dict[Modality, list[Any]] = {}
    for at, (modality, which) in enumerate(chosen):
        replacement = [100 + at] * (at + 1)
        media.append(MediaRef.model_construct(modality=modality, identity=f"{at:032x}", param="", size=1, source=None))
        records[f"{at:032x}"] = ItemRecord(
            modality=modality, identity=f"{at:032x}", target=targets[which], replacement=runs_of(replacement),
            fields={}, embeds=1, width=1, dtype="", model="", worker="", written=0,
        )  # fmt: skip
        details = its.PromptUpdateDetails.from_seq(replacement)
        items = updates.setdefault(modality, [])
        update = its.ResolvedPromptUpdate(modality, len(items), its.UpdateMode.REPLACE, targets[which], details)
        items.append([update])
    expected, found, _ = its._apply_token_matches_with_placeholders(tokens, updates)
    prompt = Prompt(token_ids=tokens, media=media)
    if all(one is not None for each in found.values() for one in each):
        assert splice(prompt, records).token_ids == expected
    else:
        with pytest.raises(InvalidRequest):
            splice(prompt, records)
