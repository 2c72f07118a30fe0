"""The progress bar of a preparation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...extras import require


class Meter:
    """Shows nothing."""

    def update(self, tokens: int, documents: int, fraction: float | None) -> None:
        """So many tokens and documents are done, and so much of the source, if that is known."""


class BarMeter(Meter):
    def __init__(self, bar: Any, name: str):
        self._bar = bar
        self._task = bar.add_task(name, total=None, tokens=0, documents=0)

    def update(self, tokens: int, documents: int, fraction: float | None) -> None:
        known = {} if fraction is None else {"total": 1.0, "completed": fraction}
        self._bar.update(self._task, tokens=tokens, documents=documents, **known)


@contextmanager
def meter(show: bool, name: str) -> Iterator[Meter]:
    if not show:
        yield Meter()
        return
    rich = require("rich.progress", "lab")
    console = require("rich.console", "lab").Console(stderr=True)
    text = "{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"
    columns = [rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TextColumn(text)]
    columns += [rich.TimeElapsedColumn(), rich.TimeRemainingColumn()]
    with rich.Progress(*columns, console=console) as bar:
        yield BarMeter(bar, name)
