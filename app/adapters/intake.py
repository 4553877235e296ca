"""What is taken of a source: the two files that the engine reads of an adapter, and nothing else that lies there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from app.adapters.base import AdapterRefused, AdapterUnreachable
from app.adapters.limits import Limits, Meter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
#: Pickles run code when they are read. vLLM reads the first two in place of safetensors that are missing.
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
#: A hash that is cut to so many hexadecimal digits, 128 bits, names a content.
VERSION_DIGITS = 32


class Intake:
    """The folder that an adapter's files are written to. `scratch` is one beside it that is thrown away."""

    def __init__(self, folder: Path, scratch: Path, limits: Limits) -> None:
        self.folder, self.scratch, self.limits = folder, scratch, limits
        self._meter = Meter(limits)
        self._hashes: dict[str, bytes] = {}

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write one of FILES. Raises AdapterTooLarge, AdapterUnreachable, and what `chunks` raises."""
        assert name in FILES, name
        content = hashlib.sha256()
        with open(self.folder / name, "xb") as file:
            for chunk in chunks:
                self._meter.add(len(chunk))
                content.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        self._hashes[name] = content.digest()

    @property
    def version(self) -> str:
        """A hash of the names and contents of the files."""
        whole = hashlib.sha256()
        for name, content in sorted(self._hashes.items()):
            whole.update(name.encode() + b"\0" + content)
        return whole.hexdigest()[:VERSION_DIGITS]


def missing(names: Collection[str], where: str) -> AdapterRefused | None:
    """What to say of a source whose files have these `names`; None if those of an adapter are among them."""
    absent = [name for name in FILES if name not in names]
    if not absent:
        return None
    pickles = [name for name in PICKLES if name in names]
    if pickles and WEIGHTS in absent:
        return AdapterRefused(f"{where} has {pickles[0]}: pickle is refused; convert it to {WEIGHTS}")
    return AdapterUnreachable(f"{where} has no {' and no '.join(absent)}")
