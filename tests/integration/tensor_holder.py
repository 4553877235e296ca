"""A process with a tensor plane of its own: told what to do in JSON lines, run by `python -m`.

`Holder` is its other end.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.messages.tensors import Descriptor
from app.settings_sections import TensorSettings
from app.tensors import folder, segment
from app.tensors.plane import TensorPlane
from app.tensors.segment import Header

PROGRESS_DELAY_US = 100
_LIMIT_S = 20.0


def pattern(seed: int, nbytes: int) -> bytes:
    """A payload that tells its seed and shows any byte out of place."""
    block = bytes((seed + at * 7) % 251 for at in range(4096 + seed % 13))
    return (block * (nbytes // len(block) + 1))[:nbytes]


class Holder:
    """Starts the process. `wire` is UCX_TLS, what NIXL may use."""

    def __init__(self, root: Path, wire: str | None = None) -> None:
        env = os.environ | ({"UCX_TLS": wire} if wire else {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.tensor_holder", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=Path(__file__).parents[2],
        )
        self._rest = b""

    def ask(self, command: str, **arguments: Any) -> Any:
        """What the process answers."""
        self.tell(command, **arguments)
        return self.hear()

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        end = time.monotonic() + _LIMIT_S
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            read = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            assert read, f"the holder said nothing; its exit status: {self.process.poll()}"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def publish(self, seed: int = 1, nbytes: int = 1 << 20, lease_s: float = 60.0) -> Descriptor:
        return Descriptor(**self.ask("publish", seed=seed, nbytes=nbytes, lease_s=lease_s))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep it from running."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> int:
        """Its exit status after an orderly end, or whatever it ended by before."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.process.returncode


class _Commands:
    def __init__(self, plane: TensorPlane) -> None:
        self._plane = plane

    async def publish(self, seed: int, nbytes: int, lease_s: float) -> Any:
        path = self._plane.directory / segment.file_name(f"{seed}-{nbytes}")
        if not path.exists():
            shape = (nbytes // 4,)
            header = Header(name=f"item{seed}", nonce=segment.new_nonce(), dtype="float32", shape=shape, nbytes=nbytes)
            segment.fill(path, header, pattern(seed, nbytes))
        return (await self._plane.publish(path, lease_s)).model_dump()

    async def withdraw(self, path: str) -> Any:
        await self._plane.withdraw(Path(path))
        os.unlink(path)
        return True

    async def ping(self) -> Any:
        return True


async def main(root: Path) -> None:
    own = folder.make_folder(root, "holder")
    plane = TensorPlane(own.path, TensorSettings(directory=str(root)), PROGRESS_DELAY_US)
    await plane.start()
    commands = _Commands(plane)
    print(json.dumps(str(own.path)), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, arguments = json.loads(line)
        print(json.dumps(await getattr(commands, command)(**arguments)), flush=True)
    await plane.close()
    own.remove()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
