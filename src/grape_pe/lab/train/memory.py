"""Memory of a training run: glibc's allocator on a CPU, and Python's garbage collector."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

#: parameters of glibc's mallopt, the values that disable them, and its own values after large tensors were freed
M_TRIM_THRESHOLD, NEVER, TRIM = -1, -1, 64 << 20
M_MMAP_THRESHOLD, LARGEST, MMAP = -3, 1 << 30, 32 << 20


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Make glibc keep freed memory for the next step; at the end return it to the system.

    By default it returns large tensors to the system, which clears the same pages again at every step: 50,000 page
    faults, a quarter of the time of a step of `mqar`. Peak memory does not change.
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


class PausedCollector:
    """Within this context garbage is collected only by `after`, every `EVERY` steps: on all ranks at the same step, so
    that no rank waits for another's collection."""

    EVERY = 50

    def __enter__(self) -> Self:
        self.enabled = gc.isenabled()
        gc.collect()
        gc.freeze()  # exempt what exists now from later collections
        gc.disable()
        return self

    def after(self, done: int) -> None:
        if done % self.EVERY == 0:
            gc.collect(1)

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self.enabled:
            gc.enable()
