"""The interface of an engine: submit a command line, poll it, cancel it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...errors import LabError


@dataclass(frozen=True)
class Resources:
    """Resources per run. Results depend on both in the last bit."""

    threads: int  #: CPU threads of torch in each process
    gpus: int  #: one process each; 0 for one process on the CPU

    @property
    def cpus(self) -> int:
        return self.threads * max(1, self.gpus)


@dataclass(frozen=True)
class Work:
    """One run: `python ARGUMENTS`."""

    name: str  #: its directory, relative to that of the comparison
    title: str  #: its name in messages
    arguments: tuple[str, ...]
    log: Path  #: file of its output, in a directory that exists on every machine
    resources: Resources
    progress: Callable[[], object] = lambda: None  #: changes whenever the run has advanced


class Lost(Exception):
    """The machine or process of a run is gone; the run is to be repeated."""


class Engine(ABC):
    """An engine is a context manager, connected while runs are made."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def resources(self, jobs: int, threads: int | None, gpus: int | None) -> Resources:
        """Resources with defaults for None, for `jobs` parallel runs (0: as many as fit)."""

    @abstractmethod
    def room(self, resources: Resources) -> int | None:
        """Number of parallel runs that fit; None if the engine has its own queue."""

    @abstractmethod
    def submit(self, work: Work) -> Any:
        """Start or queue a run; returns a handle for `poll` and `cancel`."""

    @abstractmethod
    def poll(self, handle: Any) -> int | None:
        """The exit code of a run, or None while it is running; raises Lost."""

    @abstractmethod
    def cancel(self, handle: Any, force: bool = False) -> None:
        """Ask a run to save and end, or end it at once; does not wait."""


#: exit codes of a run that was asked to end, after saving or before
STOPPED = (130, 143, -2, -15)


class Remote(Engine):
    """The engine has its own queue; its machines are not known here."""

    def resources(self, jobs: int, threads: int | None, gpus: int | None) -> Resources:
        if gpus is None:
            raise LabError(
                "--on ray and --on slurm need --gpus-per-job: give the GPUs per run, or 0 to train on CPUs"
            )
        return Resources(1 if threads is None else threads, gpus)

    def room(self, resources: Resources) -> None:
        return None


def changes(resources: Resources) -> dict[str, str]:
    """Environment variables of a run: the user's PYTHONPATH, and no GPUs if it requests none."""
    paths = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return paths if resources.gpus else {**paths, "CUDA_VISIBLE_DEVICES": ""}
