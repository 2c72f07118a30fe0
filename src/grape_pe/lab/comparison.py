"""What a comparison is: the arms, the seeds, the recipe they share, the probes; and its directory."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from .. import __version__
from .arms import Arm
from .config import Positive, RunConfig, Section, checked, load, merged, read_shipped, validated
from .errors import LabError
from .files import damaged, read_json, write_json
from .run_directory import LOCK
from .tasks import build_task
from .tasks.base import FACTORS

COMPARISON, RESULTS, REPORT, EVALUATION, PICTURE = (
    "compare.json", "results.jsonl", "report.html", "evaluation.json", "picture.json",
)  # fmt: skip
#: begins the name of a setting of the probes
PROBE = "probe."
#: what to do about a damaged evaluation, and about a damaged description of the comparison
AGAIN = "remove it and run the same grape compare again: the run is evaluated anew"
RESTORE = "restore it from a copy, or give another --out"


class Comparison(Section):
    """Every arm is trained under one recipe (but for what the arm itself sets), for every seed, with the same
    batches and first matrices."""

    name: str
    recipe: RunConfig
    arms: Annotated[list[Arm], Field(min_length=1)]
    seeds: Positive = 1
    language: bool = Field(True, description="train on text; without it only the tasks")
    evaluation_tokens: Positive = Field(16384, description="predictions at each length of the evaluation")
    tasks: list[str] = Field([], description="probes of length generalisation")
    probe: RunConfig
    task_samples: Positive = Field(64, description="examples of each length and split")
    task_factors: list[Positive] = Field(list(FACTORS), description="test lengths, in training lengths")

    def check(self) -> None:
        """Refuse an unknown encoding, task or setting before anything is trained."""
        labels = [arm.label for arm in self.arms]
        for kind, names in (("encodings", labels), ("tasks", self.tasks)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise LabError(f"{kind} must differ, but {', '.join(twice)} is there twice; name each once")
        for arm in self.arms:
            for recipe in [self.recipe] * self.language + [self.probe] * bool(self.tasks):
                _checked_arm(arm, recipe)
        for task in self.tasks:
            build_task(task)
        if not self.language and not self.tasks:
            raise LabError("nothing to compare: language is off and no task is given")


def _checked_arm(arm: Arm, recipe: RunConfig) -> None:
    try:
        arm.applied(recipe, 0).model.decoder(1)
    except LabError as problem:
        raise LabError(f"{arm.label}: {problem}") from None


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    arm: Arm
    seed: int
    task: str | None = None

    def directory(self, root: Path) -> Path:
        folder = root / "runs" if self.task is None else root / "tasks" / self.task
        return folder / f"{self.arm.label}-s{self.seed}"

    def config(self, comparison: Comparison) -> RunConfig:
        if self.task is None:
            return self.arm.applied(comparison.recipe, self.seed)
        source = {"data": {"source": f"task:{self.task}"}}
        return self.arm.applied(validated(merged(comparison.probe.model_dump(), source)), self.seed)

    @property
    def title(self) -> str:
        return " ".join(part for part in (self.task, self.arm.label, f"seed {self.seed}") if part)


def load_comparison(
    name: str,
    *,
    arms: Sequence[str | Arm] | None = None,
    seeds: int | None = None,
    tasks: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Comparison:
    """A shipped comparison or a YAML file, with other arms, seeds or tasks, and settings over its recipes.

    Args:
        overrides: settings of what is trained on text (without text, of the probes); those that begin with
            `probe.` are settings of the probes.
    """
    tree = read_shipped(name, "comparisons", "comparison")
    given = dict(overrides or {})
    of_probe = {key.removeprefix(PROBE): given.pop(key) for key in list(given) if key.startswith(PROBE)}
    if tree.get("language", True) is False:
        given, of_probe = {}, {**given, **of_probe}
    said = {
        **tree,
        "recipe": load(tree.get("recipe", "small"), given).model_dump(),
        "probe": load(tree.get("probe", "probe"), of_probe).model_dump(),
    }
    for key, value in (("arms", arms), ("seeds", seeds), ("tasks", tasks)):
        if value is not None:
            said[key] = value
    comparison = checked(Comparison, said, list(Comparison.model_fields))
    comparison.check()
    if of_probe and not comparison.tasks:
        raise LabError(f"--{PROBE}{next(iter(of_probe))} has no effect without a task; name one with --tasks")
    return comparison


def jobs(comparison: Comparison) -> Iterator[Job]:
    """Seed by seed, so that an early look at the results is a fair one."""
    for seed in range(comparison.seeds):
        for arm in comparison.arms:
            if comparison.language:
                yield Job(arm, seed)
    for task in comparison.tasks:
        for seed in range(comparison.seeds):
            yield from (Job(arm, seed, task) for arm in comparison.arms)


def make_directory(root: Path) -> None:
    """Make a directory for a comparison; one with other files in it is refused."""
    if root.exists() and not (root / COMPARISON).exists():
        if not root.is_dir():
            raise LabError(f"--out must be a directory, but {root} is a file")
        if any(path.name != LOCK for path in root.iterdir()):
            raise LabError(f"{root} holds other files and no comparison; give an empty or new directory")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise LabError(f"cannot write to {root}: {problem.strerror}; give another --out") from None


def join_directory(root: Path, comparison: Comparison, threads: int) -> Comparison:
    """Begin a comparison, or go on with the one there, which may gain arms, seeds or tasks.

    Returns the comparison with all that the directory holds.
    """
    path = root / COMPARISON
    if path.exists():
        before = _read(path)
        comparison = _joined(root, before, comparison, threads)
        if comparison == before.comparison:
            return comparison
    write_json(path, _described(comparison, threads))
    return comparison


@dataclass(frozen=True)
class _Before:
    comparison: Comparison
    threads: int


def _read(path: Path) -> _Before:
    said = read_json(path, RESTORE)
    try:
        old = checked(Comparison, said["comparison"], list(Comparison.model_fields))
        return _Before(old, int(said["threads"]))
    except (KeyError, TypeError, LabError) as problem:
        raise damaged(path, problem, RESTORE) from None


def _joined(root: Path, before: _Before, new: Comparison, threads: int) -> Comparison:
    old = before.comparison
    fixed = set(Comparison.model_fields) - {"arms", "seeds", "tasks", "name"}
    changed = [name for name in sorted(fixed) if getattr(old, name) != getattr(new, name)]
    if before.threads != threads:
        changed.append(f"threads a run ({before.threads} -> {threads}; see --jobs)")
    if changed:
        raise LabError(
            f"{root} holds a comparison with another {', '.join(changed)}; results would not be comparable: "
            "give the same settings, or another --out"
        )
    known = {arm.label: arm for arm in old.arms}
    for arm in new.arms:
        if known.get(arm.label, arm) != arm:
            raise LabError(f"{root} has another arm {arm.label!r}; give this one another label")
    return old.model_copy(update={
        "arms": [*old.arms, *(arm for arm in new.arms if arm.label not in known)],
        "tasks": [*old.tasks, *(task for task in new.tasks if task not in old.tasks)],
        "seeds": max(old.seeds, new.seeds),
    })  # fmt: skip


def _described(comparison: Comparison, threads: int) -> dict[str, Any]:
    """What compare.json says; the first keys are what reports read."""
    return {
        "recipe": (comparison.recipe if comparison.language else comparison.probe).model_dump(),
        "arms": [arm.described() for arm in comparison.arms],
        "seeds": list(range(comparison.seeds)),
        "tasks": comparison.tasks,
        "versions": {
            "grape-pe": __version__, "torch": torch.__version__, "python": platform.python_version(),
        },
        "machine": {
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "name": platform.machine(),
        },
        "command": " ".join(["grape", *sys.argv[1:]]),
        "threads": threads,
        "comparison": comparison.model_dump(),
    }  # fmt: skip
