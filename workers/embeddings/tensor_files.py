"""Tensors in the files of the embedding store."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

from app.errors.tensors import TensorIncompatible
from app.tensors import segment
from app.tensors.segment import Header
from workers.embeddings.store import final

# The kernel moves at most 2 GiB less a page in one call.
_CHUNK = 1 << 30

#: What encoders answer with. Others are refused, in and out.
DTYPES = {str(one).removeprefix("torch."): one for one in (torch.float32, torch.bfloat16, torch.float16)}


def write(reserved: Path, identifier: str, tensor: torch.Tensor) -> None:
    """Fill a reserved file and give it its final name. Raises OSError or TensorError; the file is then not there.

    A file that is not there any more is not made anew: its room was given back.
    """
    with segment.opened(reserved, os.O_WRONLY) as file:
        try:
            header = _header(identifier, tensor)
            _fill(file, header, _bytes(tensor.detach().cpu().contiguous()))
        except BaseException:
            if _is(reserved, file):
                reserved.unlink(missing_ok=True)
            raise
        if not _is(reserved, file):
            raise FileNotFoundError(errno.ENOENT, "the room for it was given back", str(reserved))
        reserved.rename(final(reserved))


def check(path: Path, identifier: str, rows: int) -> Header:
    """Header of a file that a request may use: whole, of this item, so many rows. Raises OSError or TensorError."""
    header = segment.read_header(path)
    problem = None
    if header.name != identifier:
        problem = f"is of {header.name!r}"
    elif header.dtype not in DTYPES or len(header.shape) != 2:
        problem = f"is {header.dtype}{list(header.shape)}, not rows of {', '.join(DTYPES)}"
    elif header.shape[0] != rows:
        problem = f"has {header.shape[0]} rows where the prompt has {rows} (one name for two contents?)"
    if problem is not None:
        raise TensorIncompatible(f"the embedding stored for {identifier!r} {problem}")
    return header


def read(path: Path, identifier: str, rows: int, device: torch.device, *, pin: bool) -> torch.Tensor:
    """The tensor, on the device. Raises OSError or TensorError."""
    header = check(path, identifier, rows)
    tensor = torch.empty(tuple(header.shape), dtype=DTYPES[header.dtype], pin_memory=pin)
    segment.read_payload(path, header, into=_bytes(tensor))
    return tensor.to(device)


def _fill(file: int, header: Header, data: memoryview) -> None:
    """The header comes last: until then the file is none that anybody reads."""
    page = segment.encode(header)
    if (size := os.fstat(file).st_size) < header.total:
        raise TensorIncompatible(f"{size} bytes were reserved for {header.name}, which needs {header.total}")
    os.ftruncate(file, header.total)
    at = 0
    while at < data.nbytes:
        at += os.pwrite(file, data[at : at + _CHUNK], segment.PAGE + at)
    os.pwrite(file, page, 0)


def _is(path: Path, file: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's memory. By way of bytes, since NumPy has no bfloat16."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _header(identifier: str, tensor: torch.Tensor) -> Header:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TensorIncompatible(f"embedding {identifier!r} is of {dtype}; stored are: {', '.join(DTYPES)}")
    return Header(
        name=identifier,
        nonce=segment.new_nonce(),
        dtype=dtype,
        shape=tuple(tensor.shape),
        nbytes=tensor.numel() * tensor.itemsize,
    )
