"""Memory between the steps of a run on a CPU."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

#: parameters of glibc's mallopt, what switches each off, and where its own rule ends after large tensors were freed
M_TRIM_THRESHOLD, NEVER, TRIM = -1, -1, 64 << 20
M_MMAP_THRESHOLD, LARGEST, MMAP = -3, 1 << 30, 32 << 20


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory for the next step, where the C library is glibc; at the end give it back to the system.

    It would return large tensors to the system as they are freed, and the system would hand out and clear the same
    pages again at every step: 50,000 page faults, a quarter of the time of a step of `mqar`. Peak memory stays.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        libc.mallopt(M_TRIM_THRESHOLD, TRIM)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP)
        libc.malloc_trim(0)
