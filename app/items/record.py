"""What the cluster knows of an item: enough to put it into any prompt without its medium.

The worker that first processes an item learns this from vLLM itself and writes it to Redis, as JSON.
"""

from __future__ import annotations

from pydantic import Field

from app.messages.base import Message
from app.messages.media import Modality
from app.messages.prompts import FieldValue


class ItemRecord(Message):
    """One item, as a model's processor turns it into prompt tokens.

    `target` is what stands for the item in a prompt that is not expanded, `replacement` what takes its place, both in
    token ids; the latter run-length coded as (token, times). `embed_runs` and `fields` are those of `RenderedItem`.
    The embedding has `embeds` rows of `width` values of `dtype`.
    """

    modality: Modality
    identity: str = Field(pattern=r"^[0-9a-f]{32,64}$")
    target: list[int] = Field(min_length=1)
    replacement: list[tuple[int, int]] = Field(min_length=1)
    embed_runs: list[int] | None = None
    fields: dict[str, FieldValue]
    embeds: int = Field(gt=0)
    width: int = Field(gt=0)
    dtype: str
    model: str
    revision: str | None = None
    processor: dict[str, object] = {}
    worker: str
    written: float
