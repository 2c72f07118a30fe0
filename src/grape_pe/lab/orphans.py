"""Worker processes end with the process that started them, also if it is killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End a process of multiprocessing with its parent. To be called first, as the parent may have ended already."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a process of multiprocessing"
    _end_with(parent.sentinel)


def end_with_input() -> None:
    """End a worker started by a command line with its standard input, which closes with its parent."""
    _end_with(0)


def _end_with(file: int) -> None:
    """End this process once `file` can be read, now or later."""
    if wait([file], timeout=0):
        os._exit(1)
    threading.Thread(target=lambda: wait([file]) and os._exit(1), daemon=True).start()
