"""A tensor plane without a network, for tests."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from app.messages.tensors import Descriptor
from app.tensors import segment


class Plane:
    """Notes what is asked of it. `gate` holds publishing up until it is set; `error` is raised instead."""

    def __init__(self) -> None:
        self.published: dict[Path, Descriptor] = {}
        self.times = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def publish(self, path: Path, lease_s: float) -> Descriptor:
        self.times += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        header = segment.read_header(path)
        self.published[path] = Descriptor(
            agent="a",
            host="h",
            path=str(path),
            address=0,
            metadata="",
            name=header.name,
            nonce=header.nonce,
            dtype=header.dtype,
            shape=list(header.shape),
            nbytes=header.nbytes,
            expires_at=time.time() + lease_s,
        )
        return self.published[path]

    async def withdraw(self, path: Path) -> None:
        assert os.access(path, os.R_OK), "to be deleted after this"
        self.published.pop(path, None)

    def read(self, source: Descriptor) -> bytes:
        path = Path(source.path)
        assert path in self.published
        return bytes(segment.read_payload(path, segment.read_header(path)))
