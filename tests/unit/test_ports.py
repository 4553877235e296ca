"""app.ports: no port is given twice on one host."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import ports

ROOT = Path(ports.__file__).parents[1]
CHILD = """
import sys
from app import ports
print(*(ports.reserve() for _ in range(20)), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """What a test reserves is free after it, and not only at the end of the process."""
    before = len(ports._held)
    yield
    for held in ports._held[before:]:
        held.close()
    del ports._held[before:]


def test_a_reserved_port_is_free_to_listen_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports.reserve()))
        listener.listen()


def test_no_port_is_given_twice_in_a_process() -> None:
    given = [ports.reserve() for _ in range(200)]
    assert len(set(given)) == 200


def test_no_port_is_given_twice_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        theirs = [int(port) for port in child.stdout.readline().split()]
        assert len(theirs) == 20
        # The kernel is made to offer their ports, which are free, before any other.
        monkeypatch.setattr(socket, "socket", offering(theirs))
        assert ports.reserve() not in theirs
    finally:
        child.stdin.close()
        child.wait(10)
        child.stdout.close()
    monkeypatch.setattr(socket, "socket", offering(theirs))
    assert ports.reserve() == theirs[0], "a port is free again when its process has ended"


def offering(wanted: list[int]) -> type[socket.socket]:
    """A socket class that binds to these ports first where any would do."""
    left = list(wanted)

    class Offering(socket.socket):
        def bind(self, address: object) -> None:
            if isinstance(address, tuple) and address[1] == 0 and left:
                address = (address[0], left.pop(0))
            super().bind(address)  # type: ignore[arg-type]

    return Offering


def test_the_reservation_leaves_no_file_and_nothing_to_inherit() -> None:
    ports.reserve()
    assert not any(os.get_inheritable(held.fileno()) for held in ports._held)
    assert all(held.getsockname().startswith(b"\0") for held in ports._held)


def test_a_host_without_a_free_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_claim", lambda port: False)
    with pytest.raises(RuntimeError, match="no free port on 127.0.0.1"):
        ports.reserve()
