import ctypes
import os
from pathlib import Path

import pytest

from app.tensors import segment
from app.tensors.mapping import Mapping


def mapped(path: Path, *, writable: bool = False) -> Mapping:
    with segment.opened(path, os.O_RDWR if writable else os.O_RDONLY) as file:
        return Mapping(file, writable=writable)


def at(mapping: Mapping, offset: int, length: int) -> bytes:
    return ctypes.string_at(mapping.address + offset, length)


def test_both_sides_see_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 5000)
    mapping = mapped(path, writable=True)
    assert mapping.length == 5000 and at(mapping, 4990, 10) == b"x" * 10
    ctypes.memset(mapping.address + 4999, ord("y"), 1)
    assert path.read_bytes()[4998:] == b"xy"
    mapping.unmap()


def test_withdrawn_memory_reads_as_zeros_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 10_000)
    mapping = mapped(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    mapping.withdraw()
    assert at(mapping, 0, 10_000) == bytes(10_000)
    assert path.read_bytes() == b"x" * 10_000
    # Nothing keeps the file's memory any more once its name is gone.
    assert str(path) not in Path("/proc/self/maps").read_text()
    mapping.unmap()
    mapping.unmap()
    mapping.withdraw()


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(OSError, match="mmap"):
        mapped(tmp_path / "empty")
