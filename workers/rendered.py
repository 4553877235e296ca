"""Adapter to vLLM: its rendered multimodal input <-> `RenderedPrompt`, which leaves the pixels out.

A decode worker given such a prompt needs neither pixels nor media: positions come from the `keep_on_cpu` fields, and
everything else is in the KV blocks. `is_embed` has to travel too: vLLM's own wire format drops it.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from vllm.inputs import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
)

from app.messages import FieldValue, Modality, RenderedItem, RenderedPrompt

_KINDS = {MultiModalBatchedField: "batched", MultiModalFlatField: "flat", MultiModalSharedField: "shared"}


def without_pixels(engine_input: Any) -> RenderedPrompt:
    """What another engine has to know of a prompt that this one rendered."""
    items = [
        _item(modality, identity, place, kwargs)
        for modality, places in (engine_input.get("mm_placeholders") or {}).items()
        for identity, place, kwargs in zip(
            engine_input["mm_hashes"][modality], places, engine_input["mm_kwargs"][modality], strict=True
        )
    ]
    return RenderedPrompt(
        token_ids=list(engine_input["prompt_token_ids"]),
        items=sorted(items, key=lambda item: item.offset),
        cache_salt=engine_input.get("cache_salt"),
    )


def engine_input(prompt: RenderedPrompt) -> Any:
    """The input that vLLM's `generate` takes."""
    if not prompt.items:
        return tokens_input(prompt.token_ids, cache_salt=prompt.cache_salt)
    kwargs: dict[str, list[MultiModalKwargsItem]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[PlaceholderRange]] = {}
    for item in prompt.items:
        fields = {key: _elem(value) for key, value in item.fields.items()}
        kwargs.setdefault(item.modality, []).append(MultiModalKwargsItem(fields))
        hashes.setdefault(item.modality, []).append(item.identity)
        places.setdefault(item.modality, []).append(_place(item))
    return mm_input(prompt.token_ids, MultiModalKwargsItems(kwargs), hashes, places, cache_salt=prompt.cache_salt)


def media_tokens(engine_input: Any) -> dict[str, int]:
    """Placeholder tokens by modality, as usage counts them."""
    places = engine_input.get("mm_placeholders") or {}
    return {modality: sum(place.length for place in each) for modality, each in places.items() if each}


def _item(modality: Modality, identity: str, place: PlaceholderRange, kwargs: MultiModalKwargsItem) -> RenderedItem:
    return RenderedItem(
        modality=modality,
        identity=identity,
        offset=place.offset,
        length=place.length,
        embed_runs=None if place.is_embed is None else _runs(place.is_embed.tolist()),
        fields={key: _value(elem) for key, elem in kwargs.items() if elem.field.keep_on_cpu},
    )


def _runs(mask: list[bool]) -> list[int]:
    runs = [len(list(group)) for _, group in groupby(mask)]
    return [0, *runs] if mask and mask[0] else runs


def _mask(runs: list[int]) -> torch.Tensor:
    return torch.tensor([bool(at % 2) for at, run in enumerate(runs) for _ in range(run)])


def _place(item: RenderedItem) -> PlaceholderRange:
    mask = None if item.embed_runs is None else _mask(item.embed_runs)
    return PlaceholderRange(offset=item.offset, length=item.length, is_embed=mask)


def _value(elem: MultiModalFieldElem) -> FieldValue:
    kind, dim = _KINDS[type(elem.field)], getattr(elem.field, "dim", 0)
    data = elem.data
    if not isinstance(data, torch.Tensor):
        return FieldValue(kind=kind, dim=dim, data=data)
    dtype = str(data.dtype).removeprefix("torch.")
    return FieldValue(kind=kind, dim=dim, dtype=dtype, shape=list(data.shape), data=data.flatten().tolist())


def _elem(value: FieldValue) -> MultiModalFieldElem:
    data: Any = value.data
    if value.dtype is not None:
        data = torch.tensor(data, dtype=getattr(torch, value.dtype)).reshape(value.shape)
    field: Any
    if value.kind == "batched":
        field = MultiModalBatchedField(keep_on_cpu=True)
    elif value.kind == "flat":
        field = MultiModalFlatField(keep_on_cpu=True, slices=[slice(None)], dim=value.dim)
    else:
        field = MultiModalSharedField(keep_on_cpu=True, batch_size=1)
    return MultiModalFieldElem(data=data, field=field)
