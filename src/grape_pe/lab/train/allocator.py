"""Memory between the steps of a run on a CPU."""

from __future__ import annotations

import ctypes
import platform

#: parameters of glibc's mallopt, and what switches each off
M_TRIM_THRESHOLD, NEVER = -1, -1
M_MMAP_THRESHOLD, LARGEST = -3, 1 << 30


def keep_freed_memory() -> None:
    """Keep freed memory for the next step, where the C library is glibc.

    It would return large tensors to the system as they are freed, and the system would hand out and clear the same
    pages again at every step: 50,000 page faults, a quarter of the time of a step of `mqar`. Peak memory stays.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, NEVER)
        mallopt(M_MMAP_THRESHOLD, LARGEST)
