"""Memory that is freed goes back to the system, while points are read that shall not stay in it.

A limit of memory (a container's, RLIMIT_DATA) counts what a process holds, used or not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_TRIM, _MAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's mallopt."""

SMALL, LARGE = 1 << 18, 1 << 25
"""Bytes from which a piece of memory is mapped by itself, and given back as soon as it is freed.
The second is what glibc arrives at by itself, and twice as much may then be free at the top: steps
of training, which take and free the same pieces again and again, were half as fast with the first.
"""


@contextmanager
def lean(wanted: bool = True) -> Iterator[None]:
    """Hold no more than what is in use, as far as this system can; nothing unless it is `wanted`.

    pyarrow, if it is not imported yet, takes its memory from the system: its own allocator reserves
    1 GiB at once, and keeps what was freed.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    _set(SMALL, SMALL)
    try:
        yield
    finally:
        _set(LARGE, 2 * LARGE)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _set(mapped: int, free: int) -> None:
    with suppress(OSError, AttributeError):  # another library than glibc has no such function
        library = ctypes.CDLL(None)
        library.mallopt(_MAP, mapped)
        library.mallopt(_TRIM, free)
