"""Comparison directories, read into `Results`. What is missing or broken becomes a note, not an error.

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
from ..pictures import VERSION as PICTURE_VERSION
from .results import Arm, LanguageRun, Recipe, Results, Stretch, TaskScore

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
    arms: dict[tuple[str, int], Arm] = {}
    tasks: dict[str, None] = {}
    for directory in directories:
        said = _comparison(Path(directory))
        recipe = _recipe_index(recipes, _recipe(Path(directory), said))
        tasks |= dict.fromkeys(said.get("tasks") or ())
        for arm in _arms(Path(directory), said, recipe, notes):
            key = (arm.label, recipe)
            arms[key] = _joined(arms[key], arm, notes) if key in arms else arm
    tasks |= dict.fromkeys(score.task for arm in arms.values() for score in arm.scores)
    notes.extend(recipe_differences(recipes))
    return Results(
        tuple(_named(arm, recipes) for arm in arms.values()), tuple(recipes), tuple(tasks), tuple(notes)
    )


def _comparison(directory: Path) -> dict[str, Any]:
    path = directory / "compare.json"
    if not path.is_file():
        raise LabError(f"no compare.json in {directory}; name a directory that `grape compare` wrote")
    said = read_json(path)
    if not isinstance(said, dict) or not isinstance(said.get("arms"), list):
        raise LabError(f"{path} is damaged: expected an object with arms; run `grape compare` again")
    return said


def _recipe(directory: Path, said: Mapping[str, Any]) -> Recipe:
    return Recipe(
        name=directory.resolve().name,
        settings=_flat(said.get("recipe") or {}),
        seeds=tuple(said.get("seeds") or ()),
        machine=said.get("machine") or {},
        versions=said.get("versions") or {},
        command=str(said.get("command") or ""),
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


def _named(arm: Arm, recipes: Sequence[Recipe]) -> Arm:
    return replace(arm, label=f"{arm.label} ({recipes[arm.recipe].name})") if arm.recipe else arm


def _arms(directory: Path, said: Mapping[str, Any], recipe: int, notes: list[str]) -> Iterator[Arm]:
    stored = _stored(directory, notes)
    for each in said["arms"]:
        label = str(each["label"])
        seeds = dict.fromkeys(
            (*(said.get("seeds") or ()), *(seed for _, name, seed, _ in stored if name == label))
        )
        on_text = said.get("comparison", {}).get("language", True)
        text_seeds = seeds if on_text else ()
        runs = {seed: _language_run(directory, label, seed, stored, notes) for seed in text_seeds}
        scores = [
            score
            for task in said.get("tasks") or ()
            for seed in seeds
            for score in _scores(directory, task, label, seed, stored, notes)
        ]
        encoding = str(each.get("encoding", label))
        yield Arm(label, encoding, bool(each.get("kv_shift")), recipe, runs, tuple(scores))


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


Stored = Mapping[tuple[str, str, int, str], Mapping[str, Any]]


def _stored(directory: Path, notes: list[str]) -> Stored:
    """results.jsonl by (kind, label, seed, task): what stands in for runs whose directories are gone."""
    lines = read_lines(directory / "results.jsonl", notes)
    return {
        (line.get("kind", "language"), line["label"], line["seed"], line.get("task") or ""): line
        for line in lines
        if "label" in line and "seed" in line
    }


def _evaluation(
    path: Path, key: tuple[str, str, int, str], stored: Stored, notes: list[str]
) -> Mapping[str, Any]:
    if path.is_file():
        said = read_json(path)
        if isinstance(said, dict):
            return said
        notes.append(f"{path} could not be read and was left out")
    return stored.get(key, {})


def _language_run(directory: Path, label: str, seed: int, stored: Stored, notes: list[str]) -> LanguageRun:
    run = directory / "runs" / f"{label}-s{seed}"
    said = _evaluation(run / "evaluation.json", ("language", label, seed, ""), stored, notes)
    lines = read_lines(run / "metrics.jsonl", notes)
    position = said.get("by_position") or {}
    return LanguageRun(
        seed=seed,
        evaluated=bool(said),
        val_loss=number(said.get("val_loss")),
        parameters=said.get("parameters"),
        train_length=said.get("train_length"),
        tokens_per_second=number(said.get("tokens_per_second")),
        peak_memory_bytes=number(said.get("peak_memory_bytes")),
        seconds=number(said.get("seconds")),
        by_position=_pairs(zip(position.get("position") or (), position.get("loss") or (), strict=False)),
        extrapolation=tuple(
            Stretch(int(e["length"]), e.get("window"), number(e.get("loss")))
            for e in said.get("extrapolation") or ()
        ),
        train_curve=_pairs((x.get("step"), x.get("loss")) for x in lines if x.get("kind") == "train"),
        validation_curve=_pairs(
            (x.get("step"), x.get("loss")) for x in lines if x.get("kind") == "validation"
        ),
        picture=_picture(run / "picture.json", notes),
    )


def _picture(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    said = read_json(path)
    if not isinstance(said, dict) or said.get("version") != PICTURE_VERSION:
        notes.append(f"{path} is no picture this version can show and was left out")
        return None
    return said


def _scores(
    directory: Path, task: str, label: str, seed: int, stored: Stored, notes: list[str]
) -> Iterator[TaskScore]:
    path = directory / "tasks" / task / f"{label}-s{seed}" / "evaluation.json"
    said = _evaluation(path, ("task", label, seed, task), stored, notes)
    for score in said.get("scores") or ():
        yield TaskScore(
            task=task,
            seed=seed,
            split=str(score.get("split") or ""),
            length=int(score.get("length") or 0),
            depth=number(score.get("depth")),
            exact=number(score.get("exact")),
            token=number(score.get("token")),
        )


def _pairs(pairs: Any) -> dict[float, float]:
    found = ((number(x), number(y)) for x, y in pairs)
    return {x: y for x, y in found if x is not None and y is not None}


def number(value: Any) -> float | None:
    """A finite number, or None."""
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fine else None


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file. A last line that a kill cut short is no news; any other broken one is."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    out, broken = [], []
    for index, line in enumerate(lines):
        try:
            out.append(json.loads(line))
        except ValueError:
            broken.append(index)
    if any(index < len(lines) - 1 for index in broken):
        notes.append(f"{path}: {len(broken)} lines could not be read and were left out")
    return [line for line in out if isinstance(line, dict)]
