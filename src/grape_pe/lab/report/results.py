"""What a report is made from: arms with their runs, and the recipes they share.

results = read_results([Path("out/small")])
results.arms[0].language[0].evaluation.val_loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..compare.arms import Arm
from ..evaluate.benchmarks import Scores
from .stored import Curve, Evaluation, Score


@dataclass(frozen=True)
class LanguageRun:
    """One training run on text; `evaluation` is None until it is done."""

    seed: int
    evaluation: Evaluation | None = None
    train_curve: Curve = field(default_factory=dict)
    validation_curve: Curve = field(default_factory=dict)
    picture: Mapping[str, Any] | None = None

    @property
    def diverged(self) -> bool:
        return self.evaluation is not None and self.evaluation.val_loss is None


@dataclass(frozen=True)
class ArmResults:
    """One arm under one recipe, over its seeds; `label` names it in the report."""

    label: str
    arm: Arm
    recipe: int
    language: Mapping[int, LanguageRun]
    #: by task and seed; None until it is done
    probes: Mapping[tuple[str, int], Evaluation | None] = field(default_factory=dict)

    def scores(self, task: str) -> dict[int, list[Score]]:
        """Seed to the scores on a task, where there are any."""
        found = {seed: each for (name, seed), each in self.probes.items() if name == task}
        return {seed: each.scores for seed, each in found.items() if each is not None and each.scores}

    @property
    def evaluations(self) -> dict[int, Evaluation]:
        found = {seed: run.evaluation for seed, run in self.language.items()}
        return {seed: each for seed, each in found.items() if each is not None}

    def values(self, of: Callable[[Evaluation], float | None]) -> dict[int, float]:
        """Seed to value, where there is one."""
        found = {seed: of(each) for seed, each in self.evaluations.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.language.values())

    @property
    def diverged_probes(self) -> int:
        return sum(each is not None and not each.scores for each in self.probes.values())

    @property
    def planned(self) -> int:
        return len(self.language) + len(self.probes)

    @property
    def missing(self) -> int:
        return self.planned - len(self.evaluations) - sum(each is not None for each in self.probes.values())

    @property
    def picture(self) -> Mapping[str, Any] | None:
        return next((run.picture for run in self.language.values() if run.picture), None)


@dataclass(frozen=True)
class Recipe:
    """What all runs of a directory share, and where they ran.

    `note` is what a comparison says of itself, `evidence` names a longer one whose results are shipped.
    """

    name: str
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    command: str
    note: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Results:
    """Everything a report is made from; `lm_scores` are those of `grape eval lm`, by model."""

    arms: tuple[ArmResults, ...]
    recipes: tuple[Recipe, ...]
    tasks: tuple[str, ...]
    notes: tuple[str, ...]
    lm_scores: Mapping[str, Scores] = field(default_factory=dict)

    @property
    def evaluations(self) -> list[Evaluation]:
        return [each for arm in self.arms for each in arm.evaluations.values()]

    @property
    def train_length(self) -> int | None:
        return min((each.train_length for each in self.evaluations if each.train_length), default=None)

    def lengths(self, windowed: bool = False) -> list[int]:
        """Evaluated lengths, ascending."""
        found = (e for each in self.evaluations for e in each.extrapolation)
        return sorted({e.length for e in found if (e.window is not None) == windowed})

    @property
    def longest(self) -> int | None:
        """The longest evaluated length without a window."""
        return max(self.lengths(), default=None)

    def times(self, length: int | None) -> str:
        """A length in multiples of the training length, such as "16×"."""
        return f"{length / self.train_length:g}×" if length and self.train_length else "longest"
