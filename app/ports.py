"""Ports that the program chooses: free now, never given to two Trivet processes on one host, and never the kernel's."""

from __future__ import annotations

import atexit
import random
import socket
from collections.abc import Iterator
from pathlib import Path

#: Linux's range of ports for connections that choose none: "32768\t60999" unless somebody set it (ip(7)).
KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Below it are the well-known services of others.
FIRST, LAST = 20_000, 65_535
TRIES = 1000

_held: list[socket.socket] = []


@atexit.register
def _release() -> None:
    for claim in _held:
        claim.close()


def reserve(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens and that no other Trivet process reserves while this one lives.

    A port found free can be taken by another process before it is bound, and engines bind theirs seconds later. Two
    things close that gap: a name in Linux's abstract socket namespace, which the kernel frees with the process and
    which leaves no file, and ports that the kernel gives to no outgoing connection.
    """
    for port in free(host):
        if _claim(port):
            return port
    raise RuntimeError(f"no free port on {host} after {TRIES} tries")


def free(host: str = "127.0.0.1") -> Iterator[int]:
    """Ports on which nobody listens now, for who binds one at once; at most as many as are tried."""
    for port in _candidates():
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
        yield found


def _candidates() -> Iterator[int]:
    """At random from what the kernel leaves; 0, which is its own choice, where it leaves too little."""
    low, high = (int(end) for end in KERNEL_RANGE.read_text().split())
    left = [*range(FIRST, min(low, LAST + 1)), *range(max(high + 1, FIRST), LAST + 1)]
    yield from random.sample(left, TRIES) if len(left) >= TRIES else [0] * TRIES


def _claim(port: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0trivet-port-{port}")
    except OSError:
        claim.close()
        return False
    _held.append(claim)
    return True
