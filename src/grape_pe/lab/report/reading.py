"""Read into `Results`: directories of `grape compare`, runs of `grape train`, files of `grape report --jsonl`.

A missing run is known as such; a damaged file is an error.

results = read_results([Path("out/small")])
results.arms[0].language[0].evaluation.val_loss
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compare.arms import Arm
from ..config import flat, shipped_evidence
from ..errors import LabError
from ..files import damaged, read_json
from ..inspect.figure_data import VERSION as PICTURE_VERSION
from ..train.run_directory import CONFIG, read_metrics
from .picture_figures import check_picture
from .results import ArmResults, LanguageRun, Recipe, Results
from .runs import read_lm_scores, read_run
from .stored import (
    Evaluation,
    StoredComparison,
    curves,
    read_comparison,
    read_evaluation,
    read_lines,
    went_back,
)

#: settings that belong to one run, or to how it was executed, and not to the recipe all runs share
NOT_THE_RECIPE = (
    "seed", "name", "model.encoding", "model.encoding_options", "model.kv_shift", "train.micro_batch",
    "train.compile", "train.recompute", "train.strategy", "train.shard", "train.context_parallel",
    "train.checkpoint_every", "train.keep", "log.every", "log.tensorboard", "log.wandb",
)  # fmt: skip
#: one place of results: its recipe, tasks and arms
Source = tuple[Recipe, Sequence[str], list[ArmResults]]


def read_results(places: Sequence[Path]) -> Results:
    """Read what is named; the same label under the same recipe is one arm with more seeds.

    Args:
        places: directories of `grape compare`, of `grape train`, files of `grape report --jsonl`, and JSON files
            of `grape eval lm`.
    """
    notes: list[str] = []
    recipes: list[Recipe] = []
    arms: dict[tuple[str, int, str], ArmResults] = {}
    tasks: dict[str, None] = {}
    scores: dict[str, Any] = {}
    for place in map(Path, places):
        scores |= read_lm_scores(place)
        if place.suffix == ".json":
            continue
        recipe, named, found = _source(place, notes)
        index = _recipe_index(recipes, recipe)
        tasks |= dict.fromkeys(named)
        for each in found:
            arm = replace(each, recipe=index)
            key = (arm.label, index, json.dumps(_own_settings(arm.arm), sort_keys=True))
            arms[key] = _joined(arms[key], arm, notes) if key in arms else arm
    if not recipes:
        raise LabError("no results given; name a directory that grape compare or grape train wrote")
    notes.extend(recipe_differences(recipes))
    labelled = tuple(_named(list(arms.values()), recipes))
    return Results(labelled, tuple(recipes), tuple(tasks), tuple(notes), scores)


def shipped_with(results: Results) -> Path | None:
    """The file of the longer comparison that these results name as evidence, if it is shipped."""
    return shipped_evidence(results.recipes[0].evidence)


def _source(place: Path, notes: list[str]) -> Source:
    if place.suffix == ".jsonl" or (place / "compare.json").exists():
        return _comparison(place, notes)
    if (place / CONFIG).exists():
        recipe, arm = read_run(place, notes)
        return recipe, (), [arm]
    raise LabError(
        f"no compare.json and no {CONFIG} in {place}; name a directory that grape compare or grape train wrote, "
        "or a file of grape report --jsonl"
    )


def _comparison(place: Path, notes: list[str]) -> Source:
    """A directory, or a file, which has no training curves and no pictures."""
    if place.suffix != ".jsonl":
        stored: StoredComparison | None = read_comparison(place / "compare.json")
        found, name = read_lines(place / "results.jsonl")[1], place.resolve().name
    elif place.is_file():
        (stored, found), name = read_lines(place), place.stem
    else:
        raise LabError(f"there is no file {place}; grape report RESULTS --jsonl {place} writes one")
    text = place.suffix != ".jsonl" or any(each.kind == "language" for each in found)
    if stored is None:
        arms = {each.label: Arm.parse(each.label) for each in found}
        tasks = list(dict.fromkeys(each.task for each in found if each.task))
        stored = StoredComparison(arms=list(arms.values()), tasks=tasks)
    notes.extend(_elsewhere(stored))
    about = stored.comparison
    recipe = Recipe(
        name, flat(stored.recipe), tuple(stored.seeds), stored.machine, stored.versions, stored.command,
        str(about.get("note", "")), str(about.get("evidence", "")),
    )  # fmt: skip
    runs = _Runs(place, found, notes)
    return recipe, stored.tasks, list(runs.arms(stored, bool(about.get("language", text))))


def _elsewhere(stored: StoredComparison) -> Iterator[str]:
    for place in stored.elsewhere:
        versions = ", ".join(
            f"{k} {v}" for part in place.values() if isinstance(part, dict) for k, v in part.items()
        )
        yield f"some runs come from another machine or version ({versions}): compare losses, not speeds"


@dataclass(frozen=True)
class _Runs:
    """The runs of a comparison: what a run's directory has; a line of results.jsonl stands in for one that is gone."""

    directory: Path
    lines: Sequence[Evaluation]
    notes: list[str]

    def arms(self, stored: StoredComparison, language: bool) -> Iterator[ArmResults]:
        for arm in stored.arms:
            label = arm.label
            seeds = dict.fromkeys((*stored.seeds, *(each.seed for each in self.lines if each.label == label)))
            text = {seed: self.language_run(label, seed) for seed in seeds if language}
            probes = {(t, seed): self.probe(t, label, seed) for t in stored.tasks for seed in seeds}
            options = {**_recipe_options(stored), **arm.options}
            yield ArmResults(label, arm.model_copy(update={"options": options}), 0, text, probes)

    def evaluation(self, run: Path, label: str, seed: int, task: str | None = None) -> Evaluation | None:
        path, kind = run / "evaluation.json", "task" if task else "language"
        if path.exists():
            return read_evaluation(path)
        wanted = (kind, label, seed, task)
        return next(
            (e for e in self.lines[::-1] if (e.kind, e.label, e.seed, e.task or None) == wanted), None
        )

    def language_run(self, label: str, seed: int) -> LanguageRun:
        run = self.directory / "runs" / f"{label}-s{seed}"
        picture, lines = _picture(run / "picture.json", self.notes), read_metrics(run)
        self.notes.extend(went_back(label, seed, lines))
        return LanguageRun(seed, self.evaluation(run, label, seed), *curves(lines), picture)

    def probe(self, task: str, label: str, seed: int) -> Evaluation | None:
        return self.evaluation(self.directory / "tasks" / task / f"{label}-s{seed}", label, seed, task)


def _recipe_options(stored: StoredComparison) -> dict[str, Any]:
    """Encoding options that the recipe gives to every arm."""
    model = stored.recipe.get("model")
    options = model.get("encoding_options") if isinstance(model, dict) else None
    return options if isinstance(options, dict) else {}


def _own_settings(arm: Arm) -> dict[str, Any]:
    """Everything that is set for this arm alone."""
    model = {f"model.{name}": value for name, value in arm.model.items()}
    return arm.options | model | {f"train.{name}": value for name, value in arm.train.items()}


def _picture(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    remedy = "remove it, and the report is written without this picture"
    found = read_json(path, remedy)
    if isinstance(found.get("version"), int) and found["version"] != PICTURE_VERSION:
        notes.append(f"{path} cannot be shown by this version and was left out")
        return None
    try:
        check_picture(found)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
        raise damaged(path, f"it cannot be drawn ({problem!r:.80})", remedy) from None
    return found


def _shared(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in recipe.settings.items() if name not in NOT_THE_RECIPE}


def _recipe_index(recipes: list[Recipe], new: Recipe) -> int:
    for index, known in enumerate(recipes):
        if _shared(known) == _shared(new):
            recipes[index] = replace(known, seeds=tuple(dict.fromkeys((*known.seeds, *new.seeds))))
            return index
    recipes.append(new)
    return len(recipes) - 1


def recipe_differences(recipes: Sequence[Recipe]) -> list[str]:
    """One sentence for each recipe that is not the first one: what it changes."""
    notes = []
    first = _shared(recipes[0])
    for other in recipes[1:]:
        theirs = _shared(other)
        changed = [n for n in {**first, **theirs} if first.get(n) != theirs.get(n)]
        listed = "; ".join(f"{n}: {first.get(n)} there, {theirs.get(n)} here" for n in changed[:6])
        notes.append(
            f"{other.name} used another recipe than {recipes[0].name} ({listed}). "
            "Values under different recipes are shown together but are not a fair comparison."
        )
    return notes


def _named(arms: Sequence[ArmResults], recipes: Sequence[Recipe]) -> Iterator[ArmResults]:
    """Labels that differ wherever encoding options or recipes do."""
    for arm in arms:
        twins = [each for each in arms if (each.label, each.recipe) == (arm.label, arm.recipe)]
        options = ", ".join(f"{name}={value}" for name, value in _own_settings(arm.arm).items())
        label = arm.label if len(twins) == 1 else f"{arm.label} [{options or 'default options'}]"
        yield replace(arm, label=f"{label} ({recipes[arm.recipe].name})" if arm.recipe else label)


def _joined(ours: ArmResults, theirs: ArmResults, notes: list[str]) -> ArmResults:
    """Seeds of both; a seed that was evaluated in both keeps what was read first."""
    twice = [seed for seed in theirs.evaluations if seed in ours.evaluations]
    if twice:
        seeds = ", ".join(map(str, twice))
        notes.append(f"{ours.label}: seed {seeds} is in several directories; the first counts")
    kept = {s: run for s, run in ours.language.items() if run.evaluation or s not in theirs.language}
    done = {run: found for run, found in ours.probes.items() if found or run not in theirs.probes}
    language = dict(sorted({**theirs.language, **kept}.items()))
    return replace(ours, language=language, probes={**theirs.probes, **done})
