"""What a process takes, and whether it answers, while something goes on."""

from __future__ import annotations

import http.client
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

EVERY_S = 0.02
ASK_EVERY_S = 0.1
LIMIT_S = 30.0


@dataclass
class Watch:
    """`own` is the memory that is the process's alone, `shared` that of files in shared memory: in bytes, each time
    that it was looked at. `alive_s` are the seconds that `/health/live` took, infinite without an answer."""

    own: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    alive_s: list[float] = field(default_factory=list)

    @property
    def grown(self) -> int:
        """Bytes of memory of its own at the most, beyond those at the start."""
        return max(self.own) - self.own[0]


def memory(process: psutil.Process) -> tuple[int, int]:
    """(own, shared)."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    found = {name: value for name, _, value in (line.partition(":") for line in lines)}
    own, shared = (int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    return own, shared


@contextmanager
def watching(process: psutil.Process, port: int) -> Iterator[Watch]:
    """The API's process, while the block runs."""
    watch, ended = Watch(), threading.Event()

    def look() -> None:
        while not ended.wait(EVERY_S):
            own, shared = memory(process)
            watch.own.append(own)
            watch.shared.append(shared)

    def ask() -> None:
        while not ended.wait(ASK_EVERY_S):
            watch.alive_s.append(_alive_s(port))

    own, shared = memory(process)
    watch.own.append(own)
    watch.shared.append(shared)
    threads = [threading.Thread(target=look), threading.Thread(target=ask)]
    for one in threads:
        one.start()
    try:
        yield watch
    finally:
        ended.set()
        for one in threads:
            one.join()


def _alive_s(port: int) -> float:
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/health/live")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        status = 0
    finally:
        connection.close()
    return time.perf_counter() - started if status == 200 else math.inf
