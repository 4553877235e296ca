import errno
import os
import stat
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from app.errors.tensors import TensorIncompatible
from app.tensors import segment
from app.tensors.segment import PAGE, Header


def header(name: str = "item", dtype: str = "float32", shape: tuple[int, ...] = (3, 5)) -> Header:
    nbytes = segment.ITEM_SIZES[dtype]
    for extent in shape:
        nbytes *= extent
    return Header(name=name, nonce=segment.new_nonce(), dtype=dtype, shape=shape, nbytes=nbytes)


def test_what_is_filled_is_read(tmp_path: Path) -> None:
    path, one, payload = tmp_path / "a", header(), os.urandom(60)
    segment.fill(path, one, payload)
    assert segment.read_header(path) == one
    assert segment.read_payload(path, one) == payload
    status = path.stat()
    assert status.st_size == one.total == PAGE + 60 and stat.S_IMODE(status.st_mode) == 0o600


def test_payload_into_memory(tmp_path: Path) -> None:
    path, one, payload = tmp_path / "a", header(), os.urandom(60)
    segment.fill(path, one, memoryview(payload))
    memory = bytearray(60)
    segment.read_payload(path, one, memoryview(memory))
    assert memory == payload
    with pytest.raises(TensorIncompatible, match="do not fit memory of 59"):
        segment.read_payload(path, one, memoryview(bytearray(59)))


def test_an_allocated_file_is_filled_in_place(tmp_path: Path) -> None:
    path, one = tmp_path / "a", header()
    segment.allocate(path, one.total)
    inode = path.stat().st_ino
    with pytest.raises(TensorIncompatible, match="header is missing"):
        segment.read_header(path)
    segment.fill(path, one, bytes(60))
    assert segment.read_header(path) == one and path.stat().st_ino == inode
    with pytest.raises(FileExistsError):
        segment.allocate(path, one.total)
    with pytest.raises(TensorIncompatible, match="the buffer needs"):
        segment.fill(path, header(shape=(4, 5)), bytes(80))


def test_the_header_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    write = os.pwrite

    def slow(file: int, data: bytes, at: int) -> int:
        places.append(at)
        return write(file, data[:7] if at else data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    one = header()
    segment.fill(tmp_path / "a", one, bytes(range(60)))
    assert places == [*range(PAGE, PAGE + 60, 7), 0]
    assert segment.read_payload(tmp_path / "a", one) == bytes(range(60))


def test_short_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        segment.allocate(tmp_path / "a", 4096)
    with pytest.raises(OSError, match="No space"):
        segment.fill(tmp_path / "b", header(), bytes(60))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "complex64"}, "unknown type complex64"),
        ({"dtype": "float64"}, "60 bytes, but"),
        ({"shape": (3, 6)}, "has 72"),
        ({"shape": (-3, -5)}, "not a shape"),
        ({"shape": (1,) * 17}, "not a shape"),
        ({"shape": (1 << 60, 1 << 60)}, "not a shape"),
        ({"nbytes": 61}, "61 bytes"),
        ({"nonce": "xyz"}, "nonce"),
        ({"nonce": "A" * 16}, "nonce"),
    ],
)
def test_headers_that_contradict_themselves(fields: dict[str, object], message: str) -> None:
    good = {"name": "x", "nonce": "0" * 16, "dtype": "float32", "shape": (3, 5), "nbytes": 60}
    Header(**good)  # type: ignore[arg-type]
    with pytest.raises(TensorIncompatible, match=message):
        Header(**(good | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_ones(shape: tuple[int, ...], tmp_path: Path) -> None:
    one = header(shape=shape)
    segment.fill(tmp_path / "a", one, bytes(one.nbytes))
    assert segment.read_payload(tmp_path / "a", one) == bytes(one.nbytes)


def test_a_name_that_does_not_fit_the_page(tmp_path: Path) -> None:
    with pytest.raises(TensorIncompatible, match="longer than a page"):
        segment.fill(tmp_path / "a", header(name="x" * 4096), bytes(60))
    assert not (tmp_path / "a").exists()


def test_a_payload_of_another_length(tmp_path: Path) -> None:
    with pytest.raises(TensorIncompatible, match="59 bytes, not 60"):
        segment.fill(tmp_path / "a", header(), bytes(59))


def test_another_buffer_under_the_name(tmp_path: Path) -> None:
    path, one = tmp_path / "a", header()
    segment.fill(path, header(), bytes(60))
    with pytest.raises(TensorIncompatible, match=one.nonce):
        segment.read_payload(path, one)


@pytest.mark.parametrize("size", [0, 5, PAGE - 1, PAGE, PAGE + 59])
def test_truncated_files(size: int, tmp_path: Path) -> None:
    path, one = tmp_path / "a", header()
    segment.fill(path, one, bytes(60))
    os.truncate(path, size)
    with pytest.raises(TensorIncompatible):
        segment.read_header(path)


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_garbage_is_no_header(text: bytes, length: int) -> None:
    for page in (
        text,
        text.ljust(PAGE, b"\0"),
        (segment.MAGIC + length.to_bytes(4, "little") + text).ljust(PAGE, b"\0"),
    ):
        with pytest.raises(TensorIncompatible):
            segment.decode(page)


@given(st.text(max_size=100), st.sampled_from(list(segment.ITEM_SIZES)), st.lists(st.integers(0, 64), max_size=4))
def test_headers_survive_the_page(name: str, dtype: str, shape: list[int]) -> None:
    one = header(name.encode("utf-8", "ignore").decode(), dtype, tuple(shape))
    page = segment.encode(one)
    assert len(page) == PAGE and segment.decode(page) == one


def test_unknown_fields_are_refused() -> None:
    page = segment.encode(header())
    start = len(segment.MAGIC) + 4
    text = page[start:].rstrip(b"\0")[:-1] + b',"more":1}'
    with pytest.raises(TensorIncompatible, match="more"):
        segment.decode((segment.MAGIC + len(text).to_bytes(4, "little") + text).ljust(PAGE, b"\0"))


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    segment.fill(tmp_path / "a", header(), bytes(60))
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic link"):
        segment.read_header(tmp_path / "b")


def test_file_names_say_nothing() -> None:
    names = {segment.file_name(name) for name in ("", "a", "../../etc/passwd", "ä" * 5000)}
    assert len(names) == 4
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names)
