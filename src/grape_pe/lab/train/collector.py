"""Python's garbage collector, run on all ranks at the same step: a rank that pauses alone makes all others wait."""

from __future__ import annotations

import gc
from typing import Self


class PausedCollector:
    """While this context is open, garbage is collected by `after`, every `EVERY` steps, and at no other time."""

    EVERY = 50

    def __enter__(self) -> Self:
        self.enabled = gc.isenabled()
        gc.collect()
        gc.freeze()  # what is there now stays: it is not looked through again
        gc.disable()
        return self

    def after(self, done: int) -> None:
        if done % self.EVERY == 0:
            gc.collect(1)

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self.enabled:
            gc.enable()
