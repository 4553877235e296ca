"""The file that a buffer is: one page of header, then the payload.

No torch and no NIXL: engine processes read and write these files too. All functions block; a file's readers find its
header only once the payload is whole.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import blake3
import msgspec

from app.errors.tensors import TensorIncompatible

MAGIC = b"TRIVET01"
PAGE = 4096
_LENGTH = struct.Struct("<I")
_START = len(MAGIC) + _LENGTH.size
_MAX_DIMENSIONS = 16
_MAX_EXTENT = 1 << 48
# The kernel moves at most 2 GiB less a page in one call.
_CHUNK = 1 << 30

#: Bytes of one value, of every type that a payload may have.
ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a payload is: `nbytes` bytes, row-major values of `dtype` (torch's name without `torch.`) in `shape`.

    `nonce` (16 hex digits) differs for each buffer ever written. A header whose parts contradict each other cannot be
    made: TensorIncompatible.
    """

    name: str
    nonce: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "shape", tuple(self.shape))
        _check(self)

    @property
    def total(self) -> int:
        """Bytes of the whole file."""
        return PAGE + self.nbytes


def new_nonce() -> str:
    return secrets.token_hex(8)


def file_name(identifier: str) -> str:
    """A file name for any identifier; what clients choose never becomes one itself."""
    return blake3.blake3(identifier.encode()).hexdigest(length=16)


def allocate(path: Path, total: int) -> None:
    """Make a file whose `total` bytes are really there: short memory is an OSError now and no SIGBUS later."""
    with _created(path) as file:
        os.posix_fallocate(file, 0, total)


def fill(path: Path, header: Header, payload: memoryview | bytes) -> None:
    """Write a new file, or one that `allocate` made. OSError when memory is short; no half-written new file stays."""
    data = memoryview(payload).cast("B")
    if data.nbytes != header.nbytes:
        raise TensorIncompatible(f"{header.name}: the payload has {data.nbytes} bytes, not {header.nbytes}")
    page = encode(header)
    try:
        with _created(path) as file:
            _write(file, data, page)
    except FileExistsError:
        with opened(path, os.O_WRONLY) as file:
            if (size := os.fstat(file).st_size) != header.total:
                raise TensorIncompatible(f"{path} has {size} bytes, and the buffer needs {header.total}") from None
            _write(file, data, page)


def encode(header: Header) -> bytes:
    """The header's page."""
    text = msgspec.json.encode(header)
    if _START + len(text) > PAGE:
        raise TensorIncompatible(f"the header of {header.name[:64]}... is longer than a page")
    return (MAGIC + _LENGTH.pack(len(text)) + text).ljust(PAGE, b"\0")


def decode(page: bytes) -> Header:
    """The header in a page; TensorIncompatible for anything else."""
    if len(page) < PAGE or not page.startswith(MAGIC):
        raise TensorIncompatible("no buffer: its header is missing")
    (length,) = _LENGTH.unpack_from(page, len(MAGIC))
    if length > PAGE - _START:
        raise TensorIncompatible("no buffer: its header is broken")
    try:
        return msgspec.json.decode(page[_START : _START + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TensorIncompatible(f"no buffer: its header is broken ({error})") from None


def read_header(path: Path) -> Header:
    """FileNotFoundError without a file; TensorIncompatible when it is no whole buffer."""
    with opened(path) as file:
        return header_of(file)


def header_of(file: int) -> Header:
    """The header of an open file, which must be as long as it says."""
    header = decode(os.pread(file, PAGE, 0))
    if (size := os.fstat(file).st_size) < header.total:
        raise TensorIncompatible(f"{header.name}: {size} bytes, and its header says {header.total}")
    return header


def read_payload(path: Path, header: Header, into: memoryview | None = None) -> bytes | memoryview:
    """The payload, new or put `into` memory of exactly its size; TensorIncompatible when another buffer lies there."""
    with opened(path) as file:
        if (found := header_of(file)) != header:
            raise TensorIncompatible(f"{path} holds {found.name} ({found.nonce}), not {header.name} ({header.nonce})")
        return payload_of(file, header) if into is None else _read_into(file, header, into)


def payload_of(file: int, header: Header) -> bytes:
    parts = []
    at, end = PAGE, header.total
    while at < end:
        part = os.pread(file, min(end - at, _CHUNK), at)
        if not part:
            raise TensorIncompatible(f"{header.name}: the file ends before its payload does")
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of an existing file; never of what a symbolic link points to."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _created(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield file
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(file)


def _read_into(file: int, header: Header, into: memoryview) -> memoryview:
    target = into.cast("B")
    if target.nbytes != header.nbytes:
        raise TensorIncompatible(f"{header.name}: {header.nbytes} bytes do not fit memory of {target.nbytes}")
    at = 0
    while at < header.nbytes:
        count = os.preadv(file, [target[at : at + _CHUNK]], PAGE + at)
        if count == 0:
            raise TensorIncompatible(f"{header.name}: the file ends before its payload does")
        at += count
    return into


def _write(file: int, payload: memoryview, page: bytes) -> None:
    at = 0
    while at < payload.nbytes:
        at += os.pwrite(file, payload[at : at + _CHUNK], PAGE + at)
    os.pwrite(file, page, 0)


def _check(header: Header) -> None:
    name = header.name[:64]
    if len(header.nonce) != 16 or not set(header.nonce) <= set("0123456789abcdef"):
        raise TensorIncompatible(f"{name}: the nonce has to be 16 hexadecimal digits")
    size = ITEM_SIZES.get(header.dtype)
    if size is None:
        raise TensorIncompatible(f"{name}: unknown type {header.dtype[:32]}; known: {', '.join(ITEM_SIZES)}")
    if len(header.shape) > _MAX_DIMENSIONS or not all(0 <= extent <= _MAX_EXTENT for extent in header.shape):
        raise TensorIncompatible(f"{name}: not a shape: {list(header.shape)[: _MAX_DIMENSIONS + 1]}")
    if (wanted := math.prod(header.shape) * size) != header.nbytes:
        raise TensorIncompatible(f"{name}: {header.nbytes} bytes, but {header.dtype}{list(header.shape)} has {wanted}")
