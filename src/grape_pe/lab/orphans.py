"""Worker processes end with the process that started them, also when that one was killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """To be called first in a worker. A parent that died while the worker was starting is noticed too."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a process of multiprocessing"
    if wait([parent.sentinel], timeout=0):
        os._exit(1)
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
