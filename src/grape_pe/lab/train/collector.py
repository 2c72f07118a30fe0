"""Garbage collection on all ranks at the same step, so that no rank waits for another's."""

from __future__ import annotations

import gc
from typing import Self


class PausedCollector:
    """Within this context garbage is collected only by `after`, every `EVERY` steps."""

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
