"""Worker processes end with the process that started them, also when that one was killed."""

from __future__ import annotations

import multiprocessing
import os
import select
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


def end_with_input() -> None:
    """The same for a worker that is started by a command line: its standard input closes with its parent."""
    if select.select([0], [], [], 0)[0]:
        os._exit(1)
    threading.Thread(target=_end_after_input, daemon=True).start()


def _end_after_input() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(1)
