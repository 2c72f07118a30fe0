"""Runs of `grape train`, read as arms with one seed each; and the scores of `grape eval lm` beside them.

The scores are read from lm_eval*.json in a run's directory (`grape eval lm RUN/final --output RUN/lm_eval.json`),
or from any JSON file of that command that is named.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from ..compare.arms import Arm
from ..config import RunConfig, flat
from ..evaluate.benchmarks import Scores
from ..files import read_json, typed
from ..train.run_directory import ENVIRONMENT, read_config, read_metrics
from .results import ArmResults, LanguageRun, Recipe
from .stored import Evaluation, curves, finite, went_back

SCORES = "lm_eval*.json"
RESTORE = "restore it from a copy, or train again in another --out"


def read_run(directory: Path, notes: list[str]) -> tuple[Recipe, ArmResults]:
    """A run as an arm with one seed, with notes; it counts as evaluated once its last step has a validation loss."""
    config, lines = read_config(directory), read_metrics(directory)
    model = config.model
    encoding = model.encoding if isinstance(model.encoding, str) else ",".join(model.encoding)
    arm = Arm(label="", encoding=encoding, options=model.encoding_options, kv_shift=model.kv_shift)
    notes.extend(went_back(encoding, config.seed, lines))
    run = LanguageRun(config.seed, _evaluation(arm.label, config, lines), *curves(lines))
    path = directory / ENVIRONMENT
    where = read_json(path, RESTORE) if path.exists() else {}
    recipe = Recipe(
        directory.resolve().name, flat(config), (config.seed,),
        where.get("machine", {}), where.get("versions", {}), where.get("command", ""),
    )  # fmt: skip
    return recipe, ArmResults(arm.label, arm, 0, {config.seed: run})


def _evaluation(label: str, config: RunConfig, lines: list[dict[str, Any]]) -> Evaluation | None:
    training, validation = ([x for x in lines if x["kind"] == kind] for kind in ("train", "validation"))
    if not validation or validation[-1]["step"] < config.train.steps:
        return None
    speeds = [x["tokens_per_second"] for x in training if x.get("tokens_per_second")]
    memory = [float(x["memory_bytes"]) for x in training if x.get("memory_bytes")]
    return Evaluation(
        label=label,
        seed=config.seed,
        val_loss=finite(validation[-1].get("loss")),
        train_length=config.data.sequence,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        peak_memory_bytes=max(memory, default=None),
    )


def read_lm_scores(place: Path) -> dict[str, Scores]:
    """Model to scores; a run's are named after its directory."""
    if place.suffix == ".json":
        found = _scores(place)
        return {_model(found.checkpoint, place): found}
    paths = sorted(place.glob(SCORES)) if place.is_dir() else []
    name = place.resolve().name
    return {name if len(paths) == 1 else f"{name}: {path.stem}": _scores(path) for path in paths}


def _model(checkpoint: str, place: Path) -> str:
    parts = [part for part in Path(checkpoint).parts if part != "final"]
    return parts[-1] if parts else place.stem


def _scores(path: Path) -> Scores:
    remedy = "write it again with grape eval lm --output"
    return typed(Scores, read_json(path, remedy), path, remedy, "no scores of grape eval lm: ")
