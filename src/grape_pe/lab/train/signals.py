"""SIGTERM and Ctrl-C: finish the step, save, exit."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """Within this context a signal only sets `received`; a second Ctrl-C raises KeyboardInterrupt."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self.previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def counts(self) -> list[int]:
        """1 for the signal received here, 0 for the others; ranks agree on their sum."""
        return [int(self.received == number) for number in self.SIGNALS]

    @classmethod
    def named(cls, counts: list[float]) -> int:
        """The signal that any rank received, or 0."""
        return next((int(number) for number, count in zip(cls.SIGNALS, counts, strict=True) if count), 0)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
