"""The interface of an engine: submit a command line, poll it, cancel it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Resources:
    """Resources per run. Results depend on both in the last bit.

    Args:
        threads: CPU threads of torch in each process.
        gpus: GPUs, one process each; 0 for one process on the CPU.
    """

    threads: int
    gpus: int

    @property
    def cpus(self) -> int:
        return self.threads * max(1, self.gpus)


@dataclass(frozen=True)
class Work:
    """One run: `python ARGUMENTS`.

    Args:
        name: its directory, relative to that of the comparison.
        title: its name in messages.
        arguments: of the interpreter.
        log: file of its output, in a directory that exists on every machine.
        resources: of the run.
        progress: returns its progress, to tell whether a lost run had advanced.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    log: Path
    resources: Resources
    progress: Callable[[], object] = lambda: None


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
