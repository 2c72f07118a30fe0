"""A comparison: arms, seeds, their recipe, probes; and its directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..config import Positive, RunConfig, Section, changed, checked, flat, load, read_shipped
from ..errors import LabError
from ..files import check_output, damaged, read_json, write_json
from ..tasks import build_task
from ..tasks.base import FACTORS
from ..train.run_directory import surroundings
from .arms import Arm
from .budgets import branches, shortened
from .engines.engine import Resources

COMPARISON, RESULTS, REPORT, EVALUATION, PICTURE = (
    "compare.json", "results.jsonl", "report.html", "evaluation.json", "picture.json",
)  # fmt: skip
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: prefix of settings of the probes
PROBE = "probe."
#: remedies for a damaged evaluation.json and compare.json
AGAIN = "remove it and run the same grape compare again: the run is evaluated anew"
RESTORE = "restore it from a copy, or give another --out"


class Comparison(Section):
    """Every arm is trained with every seed under one recipe, except for the arm's own settings, with the same batches
    and initial matrices."""

    name: str
    recipe: RunConfig
    arms: Annotated[list[Arm], Field(min_length=1)]
    seeds: Positive = 1
    language: bool = True  #: train on text; without it only the tasks
    budgets: list[Positive] = Field([])  #: tokens at which the loss is also measured
    sweep: list[Rate] = Field([])  #: learning rates tried for each arm on seed 0
    validation_tokens: Positive = 100_000  #: predictions of the loss at the end of a run
    evaluation_tokens: Positive = 65536  #: predictions at each length of the evaluation
    tasks: list[str] = Field([])  #: probes of length generalisation
    probe: RunConfig
    task_samples: Positive = 64  #: examples of each length and split
    task_factors: list[Positive] = Field(list(FACTORS))  #: test lengths, in training lengths
    note: str = ""  #: text below the results
    evidence: str = ""  #: name of shipped results to show below these

    def check(self) -> None:
        """Refuse an unknown encoding, task or setting before anything is trained."""
        labels = [arm.label for arm in self.arms]
        for kind, names in (("encodings", labels), ("tasks", self.tasks)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise LabError(f"{kind} must differ, got {', '.join(twice)} twice; name each once")
        for arm in self.arms:
            if self.language:
                _checked_arm(arm, self.recipe, self.budgets, self.sweep)
            if self.tasks:
                _checked_arm(arm, self.probe, [], self.sweep)
                self._check_table(arm)
        for task in self.tasks:
            build_task(task, **self.probe.data.task_options)
        if not self.language and not self.tasks:
            raise LabError("nothing to compare: language is off and there is no task; name one with --tasks")

    def _check_table(self, arm: Arm) -> None:
        """A table of learned positions must reach the longest probe."""
        model = arm.applied(self.probe, 0).decoder(1)
        longest = self.probe.data.sequence * max(self.task_factors)
        if model.absolute == "learned" and model.max_positions < longest:
            raise LabError(
                f"{arm.label}: probes have up to {longest} tokens, its table of positions has "
                f"{model.max_positions} rows; set max_positions: {longest} under model of this arm"
            )


def _checked_arm(arm: Arm, recipe: RunConfig, budgets: Sequence[int], sweep: Sequence[float]) -> None:
    try:
        config = arm.applied(recipe, 0)
        config.decoder(1)
        list(branches(config, budgets))
        for rate in sweep:
            changed(config, "train", lr=rate)
    except LabError as problem:
        raise LabError(f"{arm.label}: {problem}") from None


@dataclass(frozen=True)
class Job:
    """One run of a comparison; with a `trial`, a run of the sweep at this learning rate."""

    arm: Arm
    seed: int
    task: str | None = None
    trial: float | None = None

    def directory(self, root: Path) -> Path:
        if self.trial is not None:
            return root / "sweep" / (self.task or "language") / f"{self.arm.label}-lr{self.trial:g}"
        folder = root / "runs" if self.task is None else root / "tasks" / self.task
        return folder / f"{self.arm.label}-s{self.seed}"

    def config(self, comparison: Comparison, rate: float | None = None) -> RunConfig:
        """Settings of the run, at this learning rate if one is given. A trial has the smallest budget."""
        if self.task is None:
            found = self.arm.applied(comparison.recipe, self.seed)
        else:
            probe = changed(comparison.probe, "data", source=f"task:{self.task}")
            found = self.arm.applied(probe, self.seed)
        rate = rate if self.trial is None else self.trial
        if rate is not None:
            found = changed(found, "train", lr=rate)
        if self.task is not None or not comparison.budgets:
            return found
        if self.trial is not None:
            return shortened(found, min(comparison.budgets) // found.tokens_per_step)
        starts = [branch.start for branch in branches(found, comparison.budgets)]
        return changed(found, "train", checkpoint_at=starts)

    @property
    def name(self) -> str:
        """Its directory, relative to that of the comparison."""
        return self.directory(Path()).as_posix()

    @property
    def title(self) -> str:
        trial = "" if self.trial is None else f"lr {self.trial:g}"
        return " ".join(part for part in (self.task, self.arm.label, f"seed {self.seed}", trial) if part)


def load_comparison(
    name: str,
    *,
    arms: Sequence[str | Arm] | None = None,
    seeds: int | None = None,
    tasks: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    sweep: Sequence[float] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Comparison:
    """A shipped comparison or a YAML file, with other arms, seeds and so on, and settings over its recipes.

    Args:
        name: a shipped comparison or a YAML file.
        arms: the encodings to compare; those of the file by default.
        seeds: use the seeds 0 … seeds - 1.
        tasks: the probes to train besides the text.
        budgets: numbers of tokens after which the loss is also measured.
        sweep: learning rates to try for each arm before the seeds.
        overrides: settings of the recipe (without text, of the probes); those with prefix `probe.` are settings
            of the probes.
    """
    tree = read_shipped(name, "comparisons", "comparison")
    given = dict(overrides or {})
    of_probe = {key.removeprefix(PROBE): given.pop(key) for key in list(given) if key.startswith(PROBE)}
    if tree.get("language", True) is False:
        given, of_probe = {}, {**given, **of_probe}
    fields = {
        **tree,
        "recipe": load(tree.get("recipe", "small"), given).model_dump(),
        "probe": load(tree.get("probe", "probe"), of_probe).model_dump(),
    }
    given_here = {"arms": arms, "seeds": seeds, "tasks": tasks, "budgets": budgets, "sweep": sweep}
    fields |= {key: value for key, value in given_here.items() if value is not None}
    comparison = checked(Comparison, fields, list(Comparison.model_fields))
    comparison.check()
    if of_probe and not comparison.tasks:
        raise LabError(f"--{PROBE}{next(iter(of_probe))} has no effect without a task; name one with --tasks")
    return comparison


def jobs(comparison: Comparison) -> Iterator[Job]:
    """All runs, seed by seed, so that unfinished results are a fair comparison."""
    for seed in range(comparison.seeds):
        for arm in comparison.arms:
            if comparison.language:
                yield Job(arm, seed)
    for task in comparison.tasks:
        for seed in range(comparison.seeds):
            yield from (Job(arm, seed, task) for arm in comparison.arms)


def trials(comparison: Comparison) -> Iterator[Job]:
    """The runs of the sweep; an arm that sets its own learning rate has none."""
    kinds = [*([None] if comparison.language else []), *comparison.tasks]
    for task in kinds:
        for arm in comparison.arms:
            yield from trials_of(comparison, arm, task)


def trials_of(comparison: Comparison, arm: Arm, task: str | None) -> Iterator[Job]:
    if "lr" not in arm.train:
        yield from (Job(arm, 0, task, rate) for rate in comparison.sweep)


def make_directory(root: Path) -> None:
    """Make a directory for a comparison; one with other files in it is refused."""
    check_output(root, "comparison", COMPARISON)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise LabError(f"cannot write to {root}: {problem.strerror}; give another --out") from None


def join_directory(root: Path, comparison: Comparison, resources: Resources) -> Comparison:
    """Begin a comparison, or continue the one in the directory with more arms, seeds or tasks.

    Returns the union of both.
    """
    path, before = root / COMPARISON, read_begun(root)
    kept: dict[str, Any] = {}
    if before is not None:
        comparison = joined(root, before, comparison, resources)
        if comparison == before.comparison and resources == before.resources:
            return comparison
        found = read_json(path, RESTORE)
        kept = {name: found[name] for name in ("data", "elsewhere") if name in found}
    about = {  # the first keys are those that reports read
        "recipe": (comparison.recipe if comparison.language else comparison.probe).model_dump(),
        "arms": [arm.model_dump() for arm in comparison.arms],
        "seeds": list(range(comparison.seeds)),
        "tasks": comparison.tasks,
    }
    write_json(
        path, about | surroundings() | asdict(resources) | {"comparison": comparison.model_dump()} | kept
    )
    return comparison


def check_data(root: Path, data: dict[str, Any]) -> None:
    """Refuse to continue with other text."""
    stored = read_json(root / COMPARISON, RESTORE)
    before = stored.get("data")
    if before is None:
        write_json(root / COMPARISON, {**stored, "data": data})
    elif before != data:
        raise LabError(
            f"{root} holds a comparison on other data ({before} -> {data}); the built-in text depends on the versions "
            f"of Python and torch, which were {stored.get('versions')}: use those, or another --out"
        )


@dataclass(frozen=True)
class Begun:
    """A stored comparison and the resources of its runs; version 0.1 did not store GPUs."""

    comparison: Comparison
    threads: int
    gpus: int | None

    @property
    def resources(self) -> Resources:
        return Resources(self.threads, self.gpus or 0)


def read_begun(root: Path) -> Begun | None:
    """The comparison in a directory, if there is one."""
    path = root / COMPARISON
    return read_described(read_json(path, RESTORE), path, RESTORE) if path.is_file() else None


def read_described(stored: dict[str, Any], path: Path, remedy: str) -> Begun:
    """The content of compare.json."""
    try:
        old = checked(Comparison, stored["comparison"], list(Comparison.model_fields))
        gpus = stored.get("gpus")
        return Begun(old, int(stored["threads"]), None if gpus is None else int(gpus))
    except (KeyError, TypeError, ValueError) as problem:
        raise damaged(path, problem, remedy) from None


def _change(name: str, old: Any, new: Any) -> str:
    """The difference of a setting, or of the settings of a recipe; empty if there is none."""
    if old == new:
        return ""
    if not isinstance(old, RunConfig):
        return f"{name} ({old!r} -> {new!r})"
    before, after = flat(old), flat(new)
    return f"{name} ({', '.join(f'{k}: {v!r} -> {after[k]!r}' for k, v in before.items() if v != after[k])})"


def joined(root: Path, before: Begun, new: Comparison, resources: Resources) -> Comparison:
    """The arms, seeds and tasks of both; other differences are errors that name `root`."""
    old = before.comparison
    fixed = set(Comparison.model_fields) - {"arms", "seeds", "tasks", "name", "note", "evidence"}
    changes = (_change(name, getattr(old, name), getattr(new, name)) for name in sorted(fixed))
    different = [change for change in changes if change]
    if before.threads != resources.threads:
        different.append(f"threads per run ({before.threads} -> {resources.threads}; see --threads)")
    if before.gpus not in (None, resources.gpus):
        different.append(f"GPUs per run ({before.gpus} -> {resources.gpus}; see --gpus-per-job)")
    if different:
        raise LabError(
            f"{root} holds a comparison with another {', '.join(different)}; results would not be comparable: "
            "give the same settings, or another --out (or --from)"
        )
    known = {arm.label: arm for arm in old.arms}
    for arm in new.arms:
        if known.get(arm.label, arm) != arm:
            raise LabError(f"{root} has another arm {arm.label!r}; choose another label for this one")
    return old.model_copy(update={
        "arms": [*old.arms, *(arm for arm in new.arms if arm.label not in known)],
        "tasks": [*old.tasks, *(task for task in new.tasks if task not in old.tasks)],
        "seeds": max(old.seeds, new.seeds),
    })  # fmt: skip
