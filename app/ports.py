"""Ports that the program chooses: free now, and never given to two Trivet processes on one host."""

from __future__ import annotations

import atexit
import socket

_held: list[socket.socket] = []


@atexit.register
def _release() -> None:
    for claim in _held:
        claim.close()


def reserve(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens and that no other Trivet process reserves while this one lives.

    A port found free can be taken by another process before it is bound, and engines bind theirs seconds later. A name
    in Linux's abstract socket namespace, which the kernel frees with the process and which leaves no file, closes that
    gap.
    """
    for _ in range(1000):
        with socket.socket() as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
        if _claim(port):
            return port
    raise RuntimeError(f"no free port on {host} after 1000 tries")


def _claim(port: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0trivet-port-{port}")
    except OSError:
        claim.close()
        return False
    _held.append(claim)
    return True
