"""NIXL's metadata of a buffer as they travel in its descriptor: with a digest, in base64."""

from __future__ import annotations

import base64
import binascii

import blake3

from app.errors.tensors import TensorIncompatible
from app.messages.tensors import Descriptor

_DIGEST = 16


def seal(agent: str, metadata: bytes) -> str:
    """With a digest: after metadata that are cut short NIXL can never again be connected to their agent."""
    return base64.b64encode(_digest(agent, metadata) + metadata).decode()


def unseal(source: Descriptor) -> bytes:
    try:
        whole = base64.b64decode(source.metadata, validate=True)
    except binascii.Error:
        whole = b""
    digest, metadata = whole[:_DIGEST], whole[_DIGEST:]
    if not metadata or digest != _digest(source.agent, metadata):
        raise TensorIncompatible(f"{source.name}: the descriptor's metadata is broken, or not of {source.agent}")
    return metadata


def _digest(agent: str, metadata: bytes) -> bytes:
    return blake3.blake3(agent.encode() + b"\0" + metadata).digest(length=_DIGEST)
