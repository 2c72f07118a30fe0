"""One run of a comparison: train it and its budgets, then evaluate. With several ranks, all train and the first
evaluates and writes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..data import open_dataset
from ..data.dataset import first_words
from ..errors import Diverged
from ..evaluate.lengths import evaluate_language, validation_loss
from ..files import damaged, read_json, write_json, write_text
from ..inspect.figure_data import picture
from ..tasks import build_task, score
from ..train.distributed import World, default_device, first_rank
from ..train.feed import open_feed
from ..train.run_directory import training_cost
from ..train.saved_model import load_model
from ..train.trainer import train
from .budgets import Branch, branches
from .comparison import AGAIN, EVALUATION, PICTURE, Comparison, Job, trials_of

#: tokens of the validation text on which an encoding's picture is drawn
PICTURE_TOKENS = 96


def finished(job: Job, root: Path) -> bool:
    return (job.directory(root) / EVALUATION).is_file()


def run_job(job: Job, comparison: Comparison, root: Path) -> int:
    """Train and evaluate, or continue an earlier attempt; returns the signal that stopped it, or 0."""
    rate, tried = (None, []) if job.trial is not None else best_rate(job, comparison, root)
    directory, config = job.directory(root), job.config(comparison, rate)
    about: dict[str, Any] = {**job.arm.model_dump(), "seed": job.seed, "lr": config.train.lr, "sweep": tried}
    signal, diverged = _train(config, directory)
    budgets = (
        comparison.budgets if job.task is None and job.trial is None and not (signal or diverged) else []
    )
    trained: list[tuple[Branch, str]] = []  # and why it diverged, if it did
    for branch in branches(config, budgets):
        if not signal:
            start = branch.checkpoint(directory)
            signal, problem = _train(branch.config, branch.directory(directory), start)
            trained.append((branch, problem))
    if not signal and first_rank():
        found: dict[str, Any] = {"val_loss": None, "scores": [], "task": job.task, "error": diverged}
        if not diverged:
            found = _evaluated(job, directory, config, comparison, trained)
        write_json(directory / EVALUATION, about | found)
    return signal


def _train(config: RunConfig, directory: Path, start: Path | None = None) -> tuple[int, str]:
    """The signal that stopped a run, or 0; and why it diverged, if it did."""
    try:
        return train(config, directory, resume=True, quiet=True, start=start).signal, ""
    except Diverged as problem:
        return 0, str(problem)


def best_rate(job: Job, comparison: Comparison, root: Path) -> tuple[float | None, list[dict[str, Any]]]:
    """The learning rate with the lowest loss of this arm's sweep, and all that were tried."""
    tried = []
    for trial in trials_of(comparison, job.arm, job.task):
        path = trial.directory(root) / EVALUATION
        loss = read_json(path, AGAIN).get("val_loss", "")
        if not isinstance(loss, float | None):
            raise damaged(path, "it has no val_loss", AGAIN)
        tried.append({"lr": trial.trial, "loss": loss})
    scored = [(each["loss"], each["lr"]) for each in tried if each["loss"] is not None]
    return (min(scored)[1] if scored else None), tried


def _model(directory: Path) -> Any:
    return load_model(directory).to(default_device()).eval()


def _final_loss(directory: Path, config: RunConfig, comparison: Comparison) -> float | None:
    """Loss of the last weights on the validation sample that all runs share."""
    rows = -(-comparison.validation_tokens // config.data.sequence)
    loss = validation_loss(_model(directory), open_feed(config, World()).batches, rows)
    return loss if math.isfinite(loss) else None


def _evaluated(
    job: Job, directory: Path, config: RunConfig, comparison: Comparison, trained: list[tuple[Branch, str]]
) -> dict[str, Any]:
    """Measurements of a run and its budgets."""
    if job.task is not None and job.trial is None:
        task = build_task(job.task, **comparison.probe.data.task_options)
        lengths = [factor * task.length for factor in comparison.task_factors]
        scores = score(_model(directory), task, samples=comparison.task_samples, lengths=lengths)
        return {"task": job.task, "scores": [asdict(each) | {"task": job.task} for each in scores]}
    found: dict[str, Any] = {"val_loss": _final_loss(directory, config, comparison)}
    if job.trial is not None:
        return found
    whole = {"tokens": config.tokens_per_step * config.train.steps, "loss": found["val_loss"]}
    found["budgets"] = [
        {"tokens": branch.tokens, "loss": None, "error": problem} if problem
        else {"tokens": branch.tokens, "loss": _final_loss(branch.directory(directory), config, comparison)}
        for branch, problem in trained
    ] + [whole]  # fmt: skip
    model, place = _model(directory), open_feed(config, World()).directory
    assert place is not None
    found |= evaluate_language(
        model, open_dataset(place), config.data.sequence, tokens=comparison.evaluation_tokens
    )
    drawn = picture(model.cpu(), *first_words(place, PICTURE_TOKENS))
    write_text(directory / PICTURE, json.dumps(drawn))
    sizes = {"parameters": model.parameter_count(), "train_length": config.data.sequence}
    return found | sizes | training_cost(directory, config)
