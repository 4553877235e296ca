"""How the C library hands out large blocks."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

#: glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, and what they are set to.
_MMAP_THRESHOLD, LARGE = -3, 1 << 20
_TRIM_THRESHOLD, SPARE = -1, 16 << 20


def map_large_blocks() -> None:
    """Give blocks over 1 MiB mappings of their own, for good.

    So they go back to the system when they are freed, and a request's body grows without being copied. glibc's own
    threshold goes up to 32 MiB with the first such block that is freed; then bodies of 13 MB that come at the same time
    cost 100 ms of the event loop each, and not 10, and leave holes. Whoever sets it has to set how much free heap is
    kept, too, or each piece of a body makes the heap grow and shrink again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        log.info("this C library has no mallopt: large request bodies take more time and memory than they could")
        return
    mallopt(_MMAP_THRESHOLD, LARGE)
    mallopt(_TRIM_THRESHOLD, SPARE)
