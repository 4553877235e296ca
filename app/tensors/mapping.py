"""Files mapped into memory, at addresses that stay valid after the file is taken away.

Python's own mmap cannot do that: a peer that still has an address may read it over the network, and the process that
unmapped it would die of the access.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapping:
    """A whole file in memory: `length` bytes at `address`, shared with everybody who has the file."""

    def __init__(self, file: int, *, writable: bool) -> None:
        """Map an open file. OSError when there is no room for it, or no byte in it."""
        self.length = os.fstat(file).st_size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.address = _map(None, self.length, protection, mmap.MAP_SHARED, file)
        self.mapped = True
        self.withdrawn = False

    def withdraw(self) -> None:
        """Put zeros in the file's place: its memory is free for others, and its addresses stay readable."""
        if self.mapped:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _map(self.address, self.length, mmap.PROT_READ, flags, -1)
            self.withdrawn = True

    def unmap(self) -> None:
        """Give the addresses back; whoever uses them from now on kills the process."""
        if self.mapped:
            self.mapped = False
            if _libc.munmap(self.address, self.length) != 0:
                _fail("munmap")


def _map(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    got = _libc.mmap(address, length, protection, flags, file, 0)
    if got is None or got == _FAILED:
        _fail("mmap")
    return int(got)


def _fail(call: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}")
