"""Adapter to vLLM: its rendered multimodal input <-> `RenderedPrompt`, which leaves the pixels out.

A worker given such a prompt needs neither pixels nor media: positions come from the `keep_on_cpu` fields, and
everything else is in the KV blocks or the embeddings. `is_embed` has to travel too: vLLM's own wire format drops it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
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

from app.messages.media import Modality
from app.messages.prompts import FieldValue, RenderedItem, RenderedPrompt

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


def engine_input(prompt: RenderedPrompt, full: Mapping[str, MultiModalKwargsItem] = MappingProxyType({})) -> Any:
    """The input that vLLM's `generate` takes. An item whose identity is in `full` gets that, pixels included."""
    if not prompt.items:
        return tokens_input(prompt.token_ids, cache_salt=prompt.cache_salt)
    kwargs: dict[str, list[MultiModalKwargsItem]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[PlaceholderRange]] = {}
    for item in prompt.items:
        kwargs.setdefault(item.modality, []).append(full.get(item.identity) or _without_pixels(item))
        hashes.setdefault(item.modality, []).append(item.identity)
        places.setdefault(item.modality, []).append(_place(item))
    return mm_input(prompt.token_ids, MultiModalKwargsItems(kwargs), hashes, places, cache_salt=prompt.cache_salt)


def media_tokens(engine_input: Any) -> dict[str, int]:
    """Placeholder tokens by modality, as usage counts them."""
    places = engine_input.get("mm_placeholders") or {}
    return {modality: sum(place.length for place in each) for modality, each in places.items() if each}


def embeds(engine_input: Any) -> list[tuple[str, int]]:
    """(identity, placeholder tokens with an embedding) of every item of an input with media."""
    return [
        (identity, place.get_num_embeds())
        for modality, places in engine_input["mm_placeholders"].items()
        for identity, place in zip(engine_input["mm_hashes"][modality], places, strict=True)
    ]


def embed_runs(place: PlaceholderRange) -> list[int] | None:
    """`RenderedItem.embed_runs` of a placeholder."""
    return None if place.is_embed is None else _runs(place.is_embed.tolist())


def kept_fields(kwargs: MultiModalKwargsItem) -> dict[str, FieldValue]:
    """An item's fields without its pixels. Raises TypeError or ValueError for values that have no JSON form."""
    return {key: _value(elem) for key, elem in kwargs.items() if elem.field.keep_on_cpu}


def _item(modality: Modality, identity: str, place: PlaceholderRange, kwargs: MultiModalKwargsItem) -> RenderedItem:
    return RenderedItem(
        modality=modality,
        identity=identity,
        offset=place.offset,
        length=place.length,
        embed_runs=embed_runs(place),
        fields=kept_fields(kwargs),
    )


def _runs(mask: list[bool]) -> list[int]:
    runs = [len(list(group)) for _, group in groupby(mask)]
    return [0, *runs] if mask and mask[0] else runs


def _mask(runs: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(runs)) % 2 == 1, torch.tensor(runs, dtype=torch.int64))


def _place(item: RenderedItem) -> PlaceholderRange:
    mask = None if item.embed_runs is None else _mask(item.embed_runs)
    return PlaceholderRange(offset=item.offset, length=item.length, is_embed=mask)


def _without_pixels(item: RenderedItem) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({key: _elem(value) for key, value in item.fields.items()})


def _value(elem: MultiModalFieldElem) -> FieldValue:
    kind, dim = _KINDS[type(elem.field)], getattr(elem.field, "dim", 0)
    if isinstance(elem.data, torch.Tensor):
        return FieldValue(kind=kind, dim=dim, **_tensor_to_json(elem.data))
    return FieldValue(kind=kind, dim=dim, data=_to_json(elem.data))


def _to_json(data: Any) -> Any:
    """Lists and numbers as they are, tensors among them as objects. vLLM hands its engine the same: arrays as lists."""
    if isinstance(data, torch.Tensor):
        return _tensor_to_json(data)
    if isinstance(data, (list, tuple, np.ndarray)):
        return [_to_json(one) for one in data]
    if isinstance(data, np.generic):
        data = data.item()
    if not isinstance(data, (bool, int, float)):
        raise TypeError(f"a processor output of type {type(data).__name__}, which is neither numbers nor tensors")
    if not math.isfinite(data):
        raise ValueError(f"a processor output that is {data} outside of a tensor")
    return data


def _tensor_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    data = tensor.flatten().tolist()
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        data = [value if math.isfinite(value) else str(value) for value in data]  # JSON has no such numbers
    coded = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data}
    if not tensor.is_floating_point():  # where -0.0 equals 0.0 and is another value
        runs = [(value, sum(1 for _ in run)) for value, run in groupby(data)]
        if 2 * len(runs) < len(data):
            coded |= {"data": [value for value, _ in runs], "times": [times for _, times in runs]}
    return coded


def _from_json(data: Any) -> Any:
    if isinstance(data, dict):
        return _tensor(data["dtype"], data["shape"], data["data"], data.get("times"))
    return [_from_json(one) for one in data] if isinstance(data, list) else data


def _tensor(dtype: str, shape: list[int], data: list[Any], times: list[int] | None) -> torch.Tensor:
    if any(isinstance(value, str) for value in data):
        data = [float(value) for value in data]
    values = torch.tensor(data, dtype=getattr(torch, dtype))
    if times is not None:
        values = values.repeat_interleave(torch.tensor(times))
    return values.reshape(shape)


def _elem(value: FieldValue) -> MultiModalFieldElem:
    data: Any
    if value.dtype is None:
        data = _from_json(value.data)
    else:
        assert isinstance(value.data, list)
        data = _tensor(value.dtype, value.shape, value.data, value.times)
    field: Any
    if value.kind == "batched":
        field = MultiModalBatchedField(keep_on_cpu=True)
    elif value.kind == "flat":
        field = MultiModalFlatField(keep_on_cpu=True, slices=[slice(None)], dim=value.dim)
    else:
        field = MultiModalSharedField(keep_on_cpu=True, batch_size=1)
    return MultiModalFieldElem(data=data, field=field)
