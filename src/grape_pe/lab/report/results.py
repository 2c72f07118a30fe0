"""A comparison directory, read into typed objects. What is missing or broken becomes a note, not an error.

results = read_results([Path("out/small")])
results.arms[0].language[0].val_loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Curve = Mapping[float, float]


@dataclass(frozen=True)
class Stretch:
    """Loss at one length, in full (`window` None) or with attention limited to a window."""

    length: int
    window: int | None
    loss: float | None


@dataclass(frozen=True)
class LanguageRun:
    """One training run on text and its evaluation; None where a value is missing or not finite."""

    seed: int
    evaluated: bool = False
    val_loss: float | None = None
    parameters: int | None = None
    train_length: int | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    seconds: float | None = None
    by_position: Curve = field(default_factory=dict)
    extrapolation: tuple[Stretch, ...] = ()
    train_curve: Curve = field(default_factory=dict)
    validation_curve: Curve = field(default_factory=dict)
    picture: Mapping[str, Any] | None = None

    @property
    def diverged(self) -> bool:
        return self.evaluated and self.val_loss is None

    def loss_at(self, length: int, window: int | None = None) -> float | None:
        found = [s.loss for s in self.extrapolation if s.length == length and s.window == window]
        return found[0] if found else None


@dataclass(frozen=True)
class TaskScore:
    """How one run did on one task at one length (and depth)."""

    task: str
    seed: int
    split: str
    length: int
    depth: float | None
    exact: float | None
    token: float | None


@dataclass(frozen=True)
class Arm:
    """One encoding (with or without KV-shift) under one recipe, over its seeds."""

    label: str
    encoding: str
    kv_shift: bool
    recipe: int
    language: Mapping[int, LanguageRun]
    scores: tuple[TaskScore, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def values(self, of: Callable[[LanguageRun], float | None]) -> dict[int, float]:
        """Seed to value, where there is one."""
        found = {seed: of(run) for seed, run in self.language.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def picture(self) -> Mapping[str, Any] | None:
        return next((run.picture for run in self.language.values() if run.picture), None)


@dataclass(frozen=True)
class Recipe:
    """What all runs of a directory share, and where they ran."""

    name: str
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    command: str


@dataclass(frozen=True)
class Results:
    """Everything a report is made from."""

    arms: tuple[Arm, ...]
    recipes: tuple[Recipe, ...]
    tasks: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def train_length(self) -> int | None:
        lengths = [run.train_length for arm in self.arms for run in arm.language.values() if run.train_length]
        return min(lengths) if lengths else None

    @property
    def longest(self) -> int | None:
        """The longest evaluated length without a window."""
        runs = (run for arm in self.arms for run in arm.language.values())
        return max((s.length for run in runs for s in run.extrapolation if s.window is None), default=None)

    @property
    def stretch(self) -> str:
        """The longest length in multiples of the training length, such as "16×"."""
        if not self.longest or not self.train_length:
            return "longest"
        return f"{self.longest / self.train_length:g}×"
