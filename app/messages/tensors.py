"""Where a tensor or a medium lies, for whoever is to read it."""

from __future__ import annotations

from pydantic import Field

from app.messages.base import Message


class Descriptor(Message):
    """Where a buffer lies that another process may read: all that the tensor plane needs to fetch it.

    `agent` is the holder's NIXL agent, `address` the buffer's in its memory and `metadata` (base64) what NIXL wants to
    know of both. A reader with the same `host` opens `path` instead. `nonce` differs for each buffer that ever lay
    there; `dtype` and `shape` say what the `nbytes` of payload are. Readable until `expires_at` (unix seconds), and a
    reader has to expect that the holder took it away before.
    """

    agent: str
    host: str
    path: str
    address: int = Field(ge=0)
    metadata: str
    name: str
    nonce: str = Field(pattern=r"^[0-9a-f]{16}$")
    dtype: str
    shape: list[int]
    nbytes: int = Field(gt=0)
    expires_at: float
