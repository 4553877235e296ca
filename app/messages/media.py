"""Media by reference."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from app.messages.base import Message
from app.messages.tensors import Descriptor

Modality = Literal["image", "video", "audio"]


class MediaRef(Message):
    """One medium of a prompt. `identity` names its content, `param` the part of the request that it came in.

    `size` is in bytes; `media_type` is given where the bytes alone do not tell how to read them (`video/jpeg`: frames
    as base64 text, comma-separated). `source` is where the bytes lie; None where somebody has the medium's embedding.
    `processor_kwargs` are the request's own settings for the model's processor; the identity is theirs, too.
    """

    modality: Modality
    identity: str = Field(pattern=r"^[0-9a-f]{32,64}$")
    size: int = Field(gt=0)
    media_type: str = ""
    param: str
    source: Descriptor | None = None
    processor_kwargs: dict[str, Any] | None = None
