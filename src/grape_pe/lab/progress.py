"""Progress on the screen."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any


class ProgressLine:
    """Steps done, a status and the time left: a live bar on a terminal, elsewhere a line every `PAUSE` seconds."""

    PAUSE = 15.0

    def __init__(self, title: str, start: int, total: int, quiet: bool) -> None:
        self.title, self.start, self.total, self.quiet = title, start, total, quiet
        self.began = self.printed = time.monotonic()
        self.bar: Any = None
        if not quiet and sys.stderr.isatty() and find_spec("rich") is not None:
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[status]}"), TimeRemainingColumn(), console=Console(stderr=True),
        )  # fmt: skip
        self.bar.start()
        self.task = self.bar.add_task(self.title, total=self.total, completed=self.start, status="")

    def show(self, step: int, status: str, last: bool = False) -> None:
        if step < self.start:  # a resumed job begins at its checkpoint
            self.start, self.began = step, time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=step, status=status)
        elif not self.quiet and (last or time.monotonic() - self.printed > self.PAUSE):
            self.printed = time.monotonic()
            left = (self.printed - self.began) / max(1, step - self.start) * (self.total - step)
            print(
                f"{self.title} {step}/{self.total}  {status}  {left:.0f} s left", file=sys.stderr, flush=True
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
