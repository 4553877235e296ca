"""Content names everything: the same bytes under the same processor settings are the same item, whatever their URL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import blake3


def identify(data: bytes, *, modality: str, model: str, media_type: str = "", salt: str = "") -> str:
    """128-bit name of a medium as a model sees it, in hex.

    `model` is the fingerprint of the model and its processor's settings, `media_type` what the bytes do not tell of
    themselves; `salt` keeps tenants apart.
    """
    hasher = blake3.blake3()
    for part in (modality, media_type, model, salt):
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(4, "big"))
        hasher.update(encoded)
    hasher.update(data)
    return hasher.hexdigest(length=16)


def processed(identity: str, processor_kwargs: Mapping[str, Any] | None) -> str:
    """The name of a medium that a request wants processed in a way of its own; `identity` names its bytes."""
    if not processor_kwargs:
        return identity
    text = json.dumps(processor_kwargs, sort_keys=True, separators=(",", ":"))
    return blake3.blake3(f"{identity} {text}".encode()).hexdigest(length=16)
