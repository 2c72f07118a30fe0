"""A trace of a few steps and, on a GPU, a memory snapshot: `log.profile`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from .distributed import World


class Profile:
    """Records `STEPS` steps from `first` on; 0 records nothing.

    Writes RUN/profile/rank-N.json, for ui.perfetto.dev, and rank-N.pickle, for pytorch.org/memory_viz.
    """

    STEPS = 3

    def __init__(self, directory: Path, first: int, among: World) -> None:
        self.place, self.first, self.rank = directory / "profile", first, among.rank
        self.cuda = among.device.type == "cuda"
        self.running: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        if self.first and step == self.first and self.running is None:  # else the run went back
            self._start()
        yield
        if self.first and step == self.first + self.STEPS - 1:
            self._stop()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.cuda]
        self.running = profile(activities=activities, record_shapes=True)
        if self.cuda:
            torch.cuda.memory._record_memory_history()
        self.running.start()

    def _stop(self) -> None:
        if self.running is None:
            return
        self.running.stop()
        self.place.mkdir(parents=True, exist_ok=True)
        self.running.export_chrome_trace(str(self.place / f"rank-{self.rank}.json"))
        if self.cuda:
            torch.cuda.memory._dump_snapshot(str(self.place / f"rank-{self.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        self.running = None
