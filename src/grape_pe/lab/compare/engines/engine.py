"""What `grape compare` asks of the place where its runs are made: submit a command line, poll it, cancel it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Resources:
    """What each run has. Both are part of its result: sums depend on threads and ranks in the last bit.

    Args:
        threads: of torch on the CPU, in each process.
        gpus: one process each; 0 for one process on the CPU.
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
        name: its directory, from that of the comparison.
        title: its name in messages.
        arguments: of the interpreter.
        log: takes what it prints; the directory exists on every machine.
        resources: what it needs.
        progress: how far it is; another value each time a lost run has got further.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    log: Path
    resources: Resources
    progress: Callable[[], object] = lambda: None


class Lost(Exception):
    """The machine or the process that a run was on is gone, or had to end it: the run is to be made again."""


class Engine(ABC):
    """An engine is a context: it is connected while runs are made, and only then."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def resources(self, jobs: int, threads: int | None, gpus: int | None) -> Resources:
        """Fill in what was not given (None) for `jobs` runs at once (0: as many as fit)."""

    @abstractmethod
    def room(self, resources: Resources) -> int | None:
        """How many runs fit at once; None if the engine has a queue of its own."""

    @abstractmethod
    def submit(self, work: Work) -> Any:
        """Begin a run, or put it into the engine's queue; returns what `poll` and `cancel` take."""

    @abstractmethod
    def poll(self, handle: Any) -> int | None:
        """The exit code of a run, or None until it has ended; raises Lost."""

    @abstractmethod
    def cancel(self, handle: Any, force: bool = False) -> None:
        """Ask a run to save and end, or end it at once; does not wait."""
