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
        monkeypatch.setattr(ports, "_candidates", lambda: iter([*theirs, 0]))
        assert ports.reserve() not in theirs
    finally:
        child.stdin.close()
        child.wait(10)
        child.stdout.close()
    assert ports.reserve() == theirs[0], "a port is free again when its process has ended"


def test_the_kernel_gives_a_reserved_port_to_no_connection() -> None:
    """Engines bind their port half a minute later: a connection that had it would keep them from it."""
    low, high = (int(end) for end in ports.KERNEL_RANGE.read_text().split())
    assert not any(low <= ports.reserve() <= high for _ in range(100))


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        ("32768\t60999\n", {*range(20_000, 32_768), *range(61_000, 65_536)}),
        ("15000\t60999\n", set(range(61_000, 65_536))),
        ("1024\t65535\n", {0}),
        ("1024\t65000\n", {0}),
    ],
)
def test_only_what_the_kernel_leaves_is_tried(
    kernel: str, given: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "KERNEL_RANGE", tmp_path / "range")
    ports.KERNEL_RANGE.write_text(kernel)
    tried = [*ports._candidates()]
    assert len(tried) == ports.TRIES and set(tried) <= given


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(ports, "_candidates", lambda: iter([taken.getsockname()[1], 0]))
        assert ports.reserve() != taken.getsockname()[1]


def test_the_reservation_leaves_no_file_and_nothing_to_inherit() -> None:
    ports.reserve()
    assert not any(os.get_inheritable(held.fileno()) for held in ports._held)
    assert all(held.getsockname().startswith(b"\0") for held in ports._held)


def test_a_host_without_a_free_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_claim", lambda port: False)
    with pytest.raises(RuntimeError, match="no free port on 127.0.0.1"):
        ports.reserve()
