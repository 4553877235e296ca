"""The connector in the engine's workers: bytes from files into the encoder cache, and out of it into files."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from workers.embeddings import tensor_files
from workers.embeddings.scheduler_side import Step

log = logging.getLogger(__name__)

#: Seconds between two log lines about embeddings that could not be written.
FAILED_LOG_S = 60.0


class WorkerSide:
    """`writes` is True in the one worker of an engine that saves; all of them have the whole embedding."""

    def __init__(self, *, writes: bool) -> None:
        self._writes = writes
        self._said_failed = -FAILED_LOG_S

    def load(self, cache: dict[str, torch.Tensor], step: Step, device: torch.device, *, pin: bool) -> None:
        """Put into the cache what the scheduler counts on. Raises OSError or TensorError, which ends the engine."""
        for one in step.loads:
            if one.identifier not in cache:
                cache[one.identifier] = tensor_files.read(Path(one.path), one.identifier, one.rows, device, pin=pin)

    def save(self, cache: dict[str, torch.Tensor], step: Step, identifier: str) -> None:
        """Write an item that the encoder just ran on, if there is a reserved file for it."""
        path = step.saves.get(identifier)
        if path is not None:
            self._write(Path(path), identifier, cache[identifier])

    def save_cached(self, cache: dict[str, torch.Tensor], step: Step) -> None:
        """Write what was encoded in an earlier step and has got a reserved file since."""
        for identifier, path in step.cached.items():
            if identifier in cache:
                self._write(Path(path), identifier, cache[identifier])

    def _write(self, path: Path, identifier: str, tensor: torch.Tensor) -> None:
        if not self._writes or not path.exists():
            return
        try:
            tensor_files.write(path, identifier, tensor)
        except Exception as error:  # An embedding that is not stored must not end the engine.
            now = time.monotonic()
            if now - self._said_failed >= FAILED_LOG_S:
                self._said_failed = now
                log.warning("embedding %r was not stored: %s", identifier, error)
