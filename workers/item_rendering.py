"""Adapter to vLLM: what its processor makes of one item alone, and whether that is what it makes of it in a prompt."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import numpy as np
from PIL import Image

from app.errors.base import TrivetError
from app.items.record import ItemRecord
from app.items.splice import runs_of, splice
from app.messages.media import MediaRef, Modality
from app.messages.prompts import FieldValue, Prompt, RenderedItem, RenderedPrompt
from workers import rendered

log = logging.getLogger(__name__)


class NotSpliceable(Exception):
    """The processor does more with an item than to put tokens in the place of its placeholder."""


@dataclass(frozen=True)
class RenderedAlone:
    """One item that was rendered in a prompt of its own.

    `target`, `replacement` and `embeds` are those of `ItemRecord`, in plain token ids; `kwargs` is vLLM's
    MultiModalKwargsItem, pixels included, and `engine_input` the whole prompt of placeholder and item.
    """

    modality: Modality
    identity: str
    target: list[int]
    replacement: list[int]
    embed_runs: list[int] | None
    fields: dict[str, FieldValue]
    embeds: int
    kwargs: Any
    engine_input: Any

    def record(
        self,
        *,
        width: int,
        dtype: str,
        worker: str,
        model: str,
        revision: str | None = None,
        processor: dict[str, object] | None = None,
    ) -> ItemRecord:
        return ItemRecord(
            modality=self.modality,
            identity=self.identity,
            target=self.target,
            replacement=runs_of(self.replacement),
            embed_runs=self.embed_runs,
            fields=self.fields,
            embeds=self.embeds,
            width=width,
            dtype=dtype,
            model=model,
            revision=revision,
            processor=processor or {},
            worker=worker,
            written=time.time(),
        )


def limits(renderer: Any) -> dict[Modality, int]:
    """How many items of each modality the model takes in one prompt, `--limit-mm-per-prompt` considered."""
    if renderer.mm_processor is None:
        return {}
    allowed = renderer.mm_processor.info.allowed_mm_limits
    return {modality: allowed[modality] for modality in get_args(Modality) if allowed.get(modality, 0) > 0}


def placeholder(renderer: Any, modality: Modality, number: int = 1) -> str:
    """What vLLM writes into a prompt's text for the item of that number. Raises NotSpliceable if it writes nothing."""
    from vllm.model_executor.model_loader import get_model_cls

    try:
        text = get_model_cls(renderer.model_config).get_placeholder_str(modality, number)
    except ValueError as error:
        raise NotSpliceable(f"the model has no placeholder for {modality}: {error}") from error
    if not text:
        raise NotSpliceable(f"the model has no placeholder for {modality}")
    return str(text)


def placeholder_tokens(renderer: Any, modality: Modality) -> list[int]:
    """The unexpanded tokens for one item. Raises NotSpliceable if the model has none."""
    return list(_placeholder_tokens(renderer, modality))


@lru_cache(maxsize=16)
def _placeholder_tokens(renderer: Any, modality: Modality) -> tuple[int, ...]:
    text = placeholder(renderer, modality)
    return tuple(renderer.get_tokenizer().encode(text, add_special_tokens=False))


async def render(
    renderer: Any,
    token_ids: Sequence[int],
    items: Iterable[tuple[Modality, Any, str]],
    processor_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """vLLM's input for a prompt; items are (modality, data, identity), data what vLLM's `multi_modal_data` wants.

    Without vLLM's cache of processed items, which may answer with an item that has no data. Raises ValueError when the
    processor refuses an item.
    """
    data: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    for modality, one, identity in items:
        data.setdefault(modality, []).append(one)
        names.setdefault(modality, []).append(identity)
    prompt = {"prompt_token_ids": list(token_ids), "multi_modal_data": data, "multi_modal_uuids": names}
    if processor_kwargs:
        prompt["mm_processor_kwargs"] = dict(processor_kwargs)
    (whole,) = await renderer.render_cmpl_async([prompt], skip_mm_cache=True)
    if processor_kwargs:
        whole["mm_hashes"] = names  # vLLM made others of them, with the settings; ours have them
    return whole


async def render_item(
    renderer: Any,
    modality: Modality,
    data: Any,
    identity: str,
    processor_kwargs: Mapping[str, Any] | None = None,
) -> RenderedAlone:
    """One item, in a prompt that is its placeholder. Raises ValueError when the processor refuses it, NotSpliceable."""
    before = placeholder_tokens(renderer, modality)
    whole = await render(renderer, before, [(modality, data, identity)], processor_kwargs)
    try:
        (place,), (kwargs,) = whole["mm_placeholders"][modality], whole["mm_kwargs"][modality]
    except (KeyError, ValueError) as error:
        raise NotSpliceable(f"one {modality} alone did not become one item with one place") from error
    after = list(whole["prompt_token_ids"])
    try:
        fields = rendered.kept_fields(kwargs)
    except (TypeError, ValueError) as error:
        raise NotSpliceable(f"a {modality}'s fields have no JSON form: {error}") from error
    if not place.get_num_embeds():
        raise NotSpliceable(f"a {modality} without embeddings")
    return RenderedAlone(
        modality=modality,
        identity=identity,
        target=_target(before, after, place.offset, place.length),
        replacement=after[place.offset : place.offset + place.length],
        embed_runs=rendered.embed_runs(place),
        fields=fields,
        embeds=place.get_num_embeds(),
        kwargs=kwargs,
        engine_input=whole,
    )


def _target(before: list[int], after: list[int], offset: int, length: int) -> list[int]:
    """The tokens of `before` that `length` tokens of `after`, from `offset` on, took the place of."""
    rest = len(after) - offset - length
    end = len(before) - rest
    if end <= offset or before[:offset] != after[:offset] or before[end:] != after[offset + length :]:
        raise NotSpliceable("the processor changes the prompt around an item, or puts it where nothing stood")
    return before[offset:end]


def sample(modality: Modality) -> Any:
    """A small made-up item, as vLLM's `multi_modal_data` wants it."""
    return _SAMPLES[modality]()[0]


async def probe(renderer: Any, modalities: Iterable[Modality] | None = None) -> bool:
    """Whether items rendered alone and spliced into a prompt are what vLLM makes of the whole prompt.

    Tried with made-up items of each modality (those that the model takes, when not given), in small prompts. If not, or
    if an item cannot be rendered alone, the log says why, and prompts with media have to be rendered whole.
    """
    allowed = limits(renderer)
    wanted = allowed.keys() if modalities is None else set(modalities)
    tried = [modality for modality in allowed if modality in wanted]
    try:
        await _probe(renderer, {modality: allowed[modality] for modality in tried})
    except (NotSpliceable, TrivetError) as reason:
        log.warning("prompts with media are rendered whole, not from item records: %s", reason)
        return False
    except Exception:
        log.warning("prompts with media are rendered whole, not from item records: a made-up one failed", exc_info=True)
        return False
    return True


async def _probe(renderer: Any, allowed: dict[Modality, int]) -> None:
    samples = {modality: _SAMPLES[modality]() for modality in allowed}
    records: dict[str, ItemRecord] = {}
    items: dict[Modality, list[_Item]] = {}
    for modality, datas in samples.items():
        items[modality] = [(modality, data, secrets.token_hex(16)) for data in datas]
        for item in items[modality]:
            record = (await render_item(renderer, *item)).record(width=1, dtype="", worker="", model="")
            records[record.identity] = ItemRecord.model_validate_json(record.model_dump_json())
    for series in _series(items, allowed):
        for between in ("", "text"):
            await _compare(renderer, series, between, records)


def _series(items: dict[Modality, list[_Item]], allowed: dict[Modality, int]) -> Iterator[list[_Item]]:
    """What to try: each modality alone, and all of them in turn, since vLLM goes through one after the other."""
    for modality, (one, other) in items.items():
        yield [one, other, one][: allowed[modality]]
    if len(items) > 1:
        for order in (list(items), list(reversed(items))):
            yield [items[modality][at] for at in range(2) for modality in order if at < allowed[modality]]


async def _compare(renderer: Any, series: list[_Item], between: str, records: dict[str, ItemRecord]) -> None:
    counts: Counter[Modality] = Counter()
    text = between
    for modality, _, _ in series:
        counts[modality] += 1
        text += placeholder(renderer, modality, counts[modality]) + between
    token_ids = renderer.get_tokenizer().encode(text, add_special_tokens=False)
    # Names of their own, so that vLLM's cache does not answer with what it made of the same items alone.
    names = {secrets.token_hex(16): item for item in series}
    whole = await render(renderer, token_ids, [(modality, data, name) for name, (modality, data, _) in names.items()])
    theirs = rendered.without_pixels(whole)
    as_ours = [item.model_copy(update={"identity": names[item.identity][2]}) for item in theirs.items]
    media = [_without_bytes(modality, identity) for modality, _, identity in series]
    ours = splice(Prompt(token_ids=token_ids, media=media), records)
    difference = _difference(ours, theirs.model_copy(update={"items": as_ours}))
    if difference:
        raise NotSpliceable(f"of {[item[0] for item in series]} in one prompt, {difference}")


def _without_bytes(modality: Modality, identity: str) -> MediaRef:
    return MediaRef.model_construct(modality=modality, identity=identity, param="")  # type: ignore[call-arg]


def _difference(ours: RenderedPrompt, theirs: RenderedPrompt) -> str | None:
    """What of the prompt that was spliced is not what vLLM made of the whole."""
    for at, (mine, its) in enumerate(zip(ours.items, theirs.items, strict=False)):
        for name in RenderedItem.model_fields:
            # As JSON, where 1 is not 1.0.
            one, other = (json.dumps(item.model_dump(mode="json")[name], sort_keys=True) for item in (mine, its))
            if one != other:
                return f"{name} of item {at} is {other[:200]}, and {one[:200]} from its record"
    if len(ours.items) != len(theirs.items):
        return f"there are {len(theirs.items)} items, and {len(ours.items)} from records"
    return None if ours.token_ids == theirs.token_ids else "the token ids differ from those made from records"


def _pictures() -> list[Any]:
    """Two that no processor makes the same number of tokens of, if it looks at their shape."""
    return [Image.fromarray(_noise(height, width, 3)) for height, width in ((192, 192), (96, 288))]


def _videos() -> list[Any]:
    return [(_noise(frames, 64, width, 3), _metadata(frames)) for frames, width in ((4, 64), (6, 96))]


def _sounds() -> list[Any]:
    """At two rates, of which a model has at most one for its own: the other is resampled."""
    rates = ((16_000, 1.0), (44_100, 0.6))
    return [((_noise(int(rate * seconds)) / 128 - 1).astype(np.float32), rate) for rate, seconds in rates]


def _noise(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _metadata(frames: int) -> dict[str, Any]:
    return {
        "fps": 2.0,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "duration": frames / 2,
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


_Item = tuple[Modality, Any, str]
_SAMPLES: dict[Modality, Callable[[], list[Any]]] = {"image": _pictures, "video": _videos, "audio": _sounds}
