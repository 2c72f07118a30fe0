"""Comparison directories, read into `Results`. A missing run is known as such; a damaged file is an error.

results = read_results([Path("out/small")])
results.arms[0].language[0].val_loss
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import LabError
from ..files import damaged, read_json
from ..pictures import VERSION as PICTURE_VERSION
from ..run_directory import read_metrics
from .picture_figures import check_picture
from .results import Arm, LanguageRun, Recipe, Results, Stretch, TaskScore
from .stored import Evaluation, StoredComparison, read_comparison, read_evaluation, read_evaluations

#: settings that belong to one run, or to how it was executed, and not to the recipe all runs share
NOT_THE_RECIPE = (
    "seed", "name", "model.encoding", "model.encoding_options", "model.kv_shift", "train.micro_batch",
    "train.compile", "train.recompute", "train.strategy", "train.shard", "train.checkpoint_every",
    "train.keep", "log.every", "log.tensorboard", "log.wandb",
)  # fmt: skip


def read_results(directories: Sequence[Path]) -> Results:
    """Read comparison directories; the same label under the same recipe is one arm with more seeds."""
    if not directories:
        raise LabError("no directory given; name one that `grape compare` wrote")
    notes: list[str] = []
    recipes: list[Recipe] = []
    arms: dict[tuple[str, int, str], Arm] = {}
    tasks: dict[str, None] = {}
    for directory in directories:
        said = _comparison(Path(directory))
        recipe = _recipe_index(recipes, _recipe(Path(directory), said))
        tasks |= dict.fromkeys(said.tasks)
        for arm in _arms(Path(directory), said, recipe, notes):
            key = (arm.label, recipe, json.dumps(arm.options, sort_keys=True))
            arms[key] = _joined(arms[key], arm, notes) if key in arms else arm
    tasks |= dict.fromkeys(score.task for arm in arms.values() for score in arm.scores)
    notes.extend(recipe_differences(recipes))
    return Results(tuple(_named(list(arms.values()), recipes)), tuple(recipes), tuple(tasks), tuple(notes))


def _comparison(directory: Path) -> StoredComparison:
    path = directory / "compare.json"
    if not path.exists():
        raise LabError(f"no compare.json in {directory}; name a directory that `grape compare` wrote")
    return read_comparison(path)


def _recipe(directory: Path, said: StoredComparison) -> Recipe:
    return Recipe(
        name=directory.resolve().name,
        settings=_flat(said.recipe),
        seeds=tuple(said.seeds),
        machine=said.machine,
        versions=said.versions,
        command=said.command,
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names to values."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, dict) and not prefix else {name: value}
    return out


def _shared(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in recipe.settings.items() if name not in NOT_THE_RECIPE}


def _recipe_index(recipes: list[Recipe], new: Recipe) -> int:
    for index, known in enumerate(recipes):
        if _shared(known) == _shared(new):
            seeds = tuple(dict.fromkeys((*known.seeds, *new.seeds)))
            recipes[index] = replace(known, seeds=seeds)
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
        said = "; ".join(f"{n}: {first.get(n)} there, {theirs.get(n)} here" for n in changed[:6])
        notes.append(
            f"{other.name} used another recipe than {recipes[0].name} ({said}). "
            "Values under different recipes are shown together but are no fair comparison."
        )
    return notes


def _named(arms: Sequence[Arm], recipes: Sequence[Recipe]) -> Iterator[Arm]:
    """Labels that differ wherever encoding options or recipes do."""
    for arm in arms:
        twins = [each for each in arms if (each.label, each.recipe) == (arm.label, arm.recipe)]
        label = arm.label if len(twins) == 1 else f"{arm.label} {_options(arm)}"
        yield replace(arm, label=f"{label} ({recipes[arm.recipe].name})" if arm.recipe else label)


def _options(arm: Arm) -> str:
    said = ", ".join(f"{name}={value}" for name, value in arm.options.items())
    return f"[{said or 'default options'}]"


def _arms(directory: Path, said: StoredComparison, recipe: int, notes: list[str]) -> Iterator[Arm]:
    stored = _stored(directory)
    for each in said.arms:
        label = each.label
        seeds = dict.fromkeys((*said.seeds, *(seed for _, name, seed, _ in stored if name == label)))
        text_seeds = seeds if said.comparison.get("language", True) else ()
        runs = {seed: _language_run(directory, label, seed, stored, notes) for seed in text_seeds}
        scores = [
            score
            for task in said.tasks
            for seed in seeds
            for score in _scores(directory, task, label, seed, stored)
        ]
        options = {**_recipe_options(said), **each.own_settings()}
        yield Arm(label, each.encoding, each.kv_shift, recipe, runs, tuple(scores), options)


def _recipe_options(said: StoredComparison) -> dict[str, Any]:
    """Encoding options that the recipe gives to every arm."""
    model = said.recipe.get("model")
    options = model.get("encoding_options") if isinstance(model, dict) else None
    return options if isinstance(options, dict) else {}


def _joined(ours: Arm, theirs: Arm, notes: list[str]) -> Arm:
    """Seeds of both; a seed that was evaluated in both keeps what was read first."""
    twice = [
        s
        for s, r in theirs.language.items()
        if r.evaluated and s in ours.language and ours.language[s].evaluated
    ]
    if twice:
        notes.append(
            f"{ours.label}: seed {', '.join(map(str, twice))} is in several directories; the first counts"
        )
    runs = {
        **theirs.language,
        **{s: r for s, r in ours.language.items() if r.evaluated or s not in theirs.language},
    }
    known = {(score.task, score.seed) for score in ours.scores}
    more = tuple(score for score in theirs.scores if (score.task, score.seed) not in known)
    return replace(ours, language=dict(sorted(runs.items())), scores=ours.scores + more)


StoredRuns = Mapping[tuple[str, str, int, str], Evaluation]


def _stored(directory: Path) -> StoredRuns:
    """results.jsonl by (kind, label, seed, task): what stands in for runs whose directories are gone."""
    found = read_evaluations(directory / "results.jsonl")
    return {(each.kind, each.label, each.seed, each.task or ""): each for each in found}


def _evaluation(path: Path, key: tuple[str, str, int, str], stored: StoredRuns) -> Evaluation | None:
    return read_evaluation(path) if path.exists() else stored.get(key)


def _language_run(
    directory: Path, label: str, seed: int, stored: StoredRuns, notes: list[str]
) -> LanguageRun:
    run = directory / "runs" / f"{label}-s{seed}"
    said = _evaluation(run / "evaluation.json", ("language", label, seed, ""), stored)
    lines = read_metrics(run)
    found = LanguageRun(
        seed,
        train_curve=_curve(lines, "train"),
        validation_curve=_curve(lines, "validation"),
        picture=_picture(run / "picture.json", notes),
    )
    return found if said is None else _evaluated(found, said)


def _curve(lines: Sequence[Mapping[str, Any]], kind: str) -> dict[float, float]:
    return _pairs((x.get("step"), x.get("loss")) for x in lines if x["kind"] == kind)


def _evaluated(run: LanguageRun, said: Evaluation) -> LanguageRun:
    return replace(
        run,
        evaluated=True,
        val_loss=number(said.val_loss),
        parameters=said.parameters,
        train_length=said.train_length,
        tokens_per_second=number(said.tokens_per_second),
        peak_memory_bytes=number(said.peak_memory_bytes),
        seconds=number(said.seconds),
        by_position=_pairs(zip(said.by_position.position, said.by_position.loss, strict=False)),
        extrapolation=tuple(Stretch(e.length, e.window, number(e.loss)) for e in said.extrapolation),
    )


def _picture(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    remedy = "remove it, and the report is written without this picture"
    said = read_json(path, remedy)
    if isinstance(said.get("version"), int) and said["version"] != PICTURE_VERSION:
        notes.append(f"{path} is no picture this version can show and was left out")
        return None
    try:
        check_picture(said)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
        raise damaged(path, f"it cannot be drawn ({problem!r:.80})", remedy) from None
    return said


def _scores(directory: Path, task: str, label: str, seed: int, stored: StoredRuns) -> Iterator[TaskScore]:
    path = directory / "tasks" / task / f"{label}-s{seed}" / "evaluation.json"
    said = _evaluation(path, ("task", label, seed, task), stored)
    for each in said.scores if said else ():
        depth, exact, token = number(each.depth), number(each.exact), number(each.token)
        yield TaskScore(task, seed, each.split, each.length, depth, exact, token)


def _pairs(pairs: Any) -> dict[float, float]:
    found = ((number(x), number(y)) for x, y in pairs)
    return {x: y for x, y in found if x is not None and y is not None}


def number(value: Any) -> float | None:
    """A finite number, or None."""
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fine else None
