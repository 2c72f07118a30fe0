"""What a comparison is: the arms, the seeds, the recipe they share, the probes; and its directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..config import Positive, RunConfig, Section, checked, flat, load, merged, read_shipped, validated
from ..errors import LabError
from ..files import contents, damaged, read_json, write_json
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
    budgets: list[Positive] = Field([], description="tokens at which the loss is measured besides the end")
    sweep: list[Rate] = Field([], description="learning rates tried for each arm on seed 0")
    validation_tokens: Positive = Field(100_000, description="predictions of the loss at the end of a run")
    evaluation_tokens: Positive = Field(65536, description="predictions at each length of the evaluation")
    tasks: list[str] = Field([], description="probes of length generalisation")
    probe: RunConfig
    task_samples: Positive = Field(64, description="examples of each length and split")
    task_factors: list[Positive] = Field(list(FACTORS), description="test lengths, in training lengths")
    note: str = Field("", description="printed below the results")
    evidence: str = Field("", description="shipped results that are printed below these")

    def check(self) -> None:
        """Refuse an unknown encoding, task or setting before anything is trained."""
        labels = [arm.label for arm in self.arms]
        for kind, names in (("encodings", labels), ("tasks", self.tasks)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise LabError(f"{kind} must differ, but {', '.join(twice)} is there twice; name each once")
        for arm in self.arms:
            if self.language:
                _checked_arm(arm, self.recipe, self.budgets, self.sweep)
            if self.tasks:
                _checked_arm(arm, self.probe, [], self.sweep)
                self._check_table(arm)
        for task in self.tasks:
            build_task(task, **self.probe.data.task_options)
        if not self.language and not self.tasks:
            raise LabError("nothing to compare: language is off and no task is given")

    def _check_table(self, arm: Arm) -> None:
        """A table of learned positions must reach the longest probe."""
        model = arm.applied(self.probe, 0).decoder(1)
        longest = self.probe.data.sequence * max(self.task_factors)
        if model.absolute == "learned" and model.max_positions < longest:
            raise LabError(
                f"{arm.label}: probes have up to {longest} tokens, and its table of positions has "
                f"{model.max_positions} rows; set max_positions: {longest} under model of this arm"
            )


def _checked_arm(arm: Arm, recipe: RunConfig, budgets: Sequence[int], sweep: Sequence[float]) -> None:
    try:
        config = arm.applied(recipe, 0)
        config.decoder(1)
        list(branches(config, budgets))
        for rate in sweep:
            _at_rate(config, rate)
    except LabError as problem:
        raise LabError(f"{arm.label}: {problem}") from None


def _at_rate(config: RunConfig, rate: float) -> RunConfig:
    return validated(merged(config.model_dump(), {"train": {"lr": rate}}))


@dataclass(frozen=True)
class Job:
    """One run of a comparison; with a `trial`, a run of the sweep that tries this learning rate."""

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
        """What is trained, at this learning rate if one is given. A trial has the smallest budget."""
        if self.task is None:
            found = self.arm.applied(comparison.recipe, self.seed)
        else:
            source = {"data": {"source": f"task:{self.task}"}}
            found = self.arm.applied(validated(merged(comparison.probe.model_dump(), source)), self.seed)
        rate = rate if self.trial is None else self.trial
        if rate is not None:
            found = _at_rate(found, rate)
        if self.task is not None or not comparison.budgets:
            return found
        if self.trial is not None:
            return shortened(found, min(comparison.budgets) // found.tokens_per_step)
        starts = [branch.start for branch in branches(found, comparison.budgets)]
        return validated(merged(found.model_dump(), {"train": {"checkpoint_at": starts}}))

    @property
    def name(self) -> str:
        """Its directory, from that of the comparison."""
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
        budgets: numbers of tokens after which the loss is measured besides the end.
        sweep: learning rates that are tried for each arm before the seeds.
        overrides: settings of what is trained on text (without text, of the probes); those that begin with
            `probe.` are settings of the probes.
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
    """Seed by seed, so that an early look at the results is a fair one."""
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
    if root.exists() and not (root / COMPARISON).exists():
        if not root.is_dir():
            raise LabError(f"--out must be a directory, but {root} is a file")
        if contents(root):
            raise LabError(f"{root} holds other files and no comparison; give an empty or new directory")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise LabError(f"cannot write to {root}: {problem.strerror}; give another --out") from None


def join_directory(root: Path, comparison: Comparison, resources: Resources) -> Comparison:
    """Begin a comparison, or go on with the one there, which may gain arms, seeds or tasks.

    Returns the comparison with all that the directory holds.
    """
    path = root / COMPARISON
    kept: dict[str, Any] = {}
    if path.exists():
        found = read_json(path, RESTORE)
        before = read_described(found, path, RESTORE)
        comparison = joined(root, before, comparison, resources)
        if comparison == before.comparison and resources == before.resources:
            return comparison
        kept = {name: found[name] for name in ("data", "elsewhere") if name in found}
    write_json(path, {**_described(comparison, resources), **kept})
    return comparison


def check_data(root: Path, data: dict[str, Any]) -> None:
    """Refuse to go on with other text than the comparison was begun with."""
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
    """A comparison that was begun, and what each of its runs has; GPUs are not known of those of version 0.1."""

    comparison: Comparison
    threads: int
    gpus: int | None

    @property
    def resources(self) -> Resources:
        return Resources(self.threads, self.gpus or 0)


def read_described(stored: dict[str, Any], path: Path, remedy: str) -> Begun:
    """From the content of compare.json."""
    try:
        old = checked(Comparison, stored["comparison"], list(Comparison.model_fields))
        gpus = stored.get("gpus")
        return Begun(old, int(stored["threads"]), None if gpus is None else int(gpus))
    except (KeyError, TypeError, ValueError) as problem:
        raise damaged(path, problem, remedy) from None


def _change(name: str, old: Any, new: Any) -> str:
    """How a setting, or those of a recipe, differ; empty if they do not."""
    if old == new:
        return ""
    if not isinstance(old, RunConfig):
        return f"{name} ({old!r} -> {new!r})"
    before, after = flat(old), flat(new)
    return f"{name} ({', '.join(f'{k}: {v!r} -> {after[k]!r}' for k, v in before.items() if v != after[k])})"


def joined(root: Path, before: Begun, new: Comparison, resources: Resources) -> Comparison:
    """The arms, seeds and tasks of both; whatever else differs is refused by name. `root` is named in errors."""
    old = before.comparison
    fixed = set(Comparison.model_fields) - {"arms", "seeds", "tasks", "name", "note", "evidence"}
    changed = [_change(name, getattr(old, name), getattr(new, name)) for name in sorted(fixed)]
    changed = [change for change in changed if change]
    if before.threads != resources.threads:
        changed.append(f"threads a run ({before.threads} -> {resources.threads}; see --threads)")
    if before.gpus not in (None, resources.gpus):
        changed.append(f"GPUs a run ({before.gpus} -> {resources.gpus}; see --gpus-per-job)")
    if changed:
        raise LabError(
            f"{root} holds a comparison with another {', '.join(changed)}; results would not be comparable: "
            "give the same settings, or another --out (or --from)"
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


def _described(comparison: Comparison, resources: Resources) -> dict[str, Any]:
    """What compare.json says; the first keys are what reports read."""
    return {
        "recipe": (comparison.recipe if comparison.language else comparison.probe).model_dump(),
        "arms": [arm.described() for arm in comparison.arms],
        "seeds": list(range(comparison.seeds)),
        "tasks": comparison.tasks,
        **surroundings(),
        **asdict(resources),
        "comparison": comparison.model_dump(),
    }  # fmt: skip
