"""A prompt: with its media as the API knows it, and rendered as the engine takes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from app.messages.base import Message
from app.messages.media import MediaRef, Modality


class Prompt(Message):
    """A prompt as the API knows it: one placeholder token per medium, not yet expanded; media in order."""

    token_ids: list[int] = Field(min_length=1)
    media: list[MediaRef] = []
    cache_salt: str | None = None


class FieldValue(Message):
    """One processor output that is no pixel data (grids, timestamps), in JSON.

    A tensor has `dtype` and `shape` and its values flat, row-major, those that are not finite as text; where `times` is
    given, each value of `data` that many times (an audio's mask is tens of thousands of ones and zeros). A plain number
    or nested list has `dtype` None, and tensors in a list are objects of `dtype`, `shape`, `data` and `times`. `kind`
    and `dim` say how the model joins the values of several items (vLLM's field kinds).
    """

    kind: Literal["batched", "flat", "shared"]
    dim: int = 0
    dtype: str | None = None
    shape: list[int] = []
    data: list[Any] | bool | int | float
    times: list[int] | None = None


class RenderedItem(Message):
    """One medium in a rendered prompt, without its pixels.

    `offset` and `length` count prompt tokens. `embed_runs` are the lengths of alternating runs of the placeholder's
    embed mask, starting with a run of "not embedded"; None means that every token of the placeholder is.
    `fields` are the processor's outputs that positions depend on (vLLM's `keep_on_cpu` fields).
    """

    modality: Modality
    identity: str
    offset: int = Field(ge=0)
    length: int = Field(gt=0)
    embed_runs: list[int] | None = None
    fields: dict[str, FieldValue]


class RenderedPrompt(Message):
    """A prompt as the engine takes it, placeholders expanded, pixels left out."""

    token_ids: list[int] = Field(min_length=1)
    items: list[RenderedItem] = []
    cache_salt: str | None = None
