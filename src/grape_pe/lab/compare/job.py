"""One run of a comparison, from the first step to its evaluation. Runs in a process of its own, or in several ranks:
all of them train, the first one evaluates and writes."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig
from ..data import load_tokenizer, open_dataset
from ..errors import Diverged
from ..evaluate.lengths import evaluate_language, validation_loss
from ..files import damaged, read_json, write_json, write_text
from ..inspect.figure_data import picture
from ..tasks import build_task, score
from ..train.distributed import World, default_device, first_rank
from ..train.feed import open_feed
from ..train.run_directory import read_metrics
from ..train.saved_model import load_model
from ..train.trainer import train
from .budgets import Branch, branches
from .comparison import AGAIN, EVALUATION, PICTURE, Comparison, Job, trials_of

#: tokens of the validation text that an encoding's picture is drawn on
PICTURE_TOKENS = 96


def finished(job: Job, root: Path) -> bool:
    return (job.directory(root) / EVALUATION).is_file()


def run_job(job: Job, comparison: Comparison, root: Path) -> int:
    """Train and evaluate, or go on with an earlier attempt; returns the signal that stopped it, or 0."""
    rate, tried = (None, []) if job.trial is not None else best_rate(job, comparison, root)
    directory, config = job.directory(root), job.config(comparison, rate)
    result: dict[str, Any] = {**job.arm.described(), "seed": job.seed, "lr": config.train.lr, "sweep": tried}
    try:
        outcome = train(config, directory, resume=True, quiet=True)
    except Diverged as problem:
        if first_rank():
            _write(
                directory, result | {"val_loss": None, "scores": [], "task": job.task, "error": str(problem)}
            )
        return 0
    if outcome.signal:
        return outcome.signal
    trained: list[tuple[Branch, str]] = []
    if job.task is None and job.trial is None:
        trained, stopped = _train_branches(directory, config, comparison)
        if stopped:
            return stopped
    if first_rank():
        _write(directory, result | _evaluated(job, directory, config, comparison, trained))
    return 0


def _evaluated(
    job: Job, directory: Path, config: RunConfig, comparison: Comparison, trained: list[tuple[Branch, str]]
) -> dict[str, Any]:
    """What is measured of a trained run."""
    if job.trial is not None:
        return {"val_loss": _final_loss(directory, config, comparison)}
    if job.task is not None:
        return _task_scores(job, comparison, _model(directory))
    budgets = [_at_budget(branch, problem, directory, config, comparison) for branch, problem in trained]
    loss = _final_loss(directory, config, comparison)
    whole = {"tokens": config.tokens_per_step * config.train.steps, "loss": loss}
    found = _language(directory, config, comparison, _model(directory))
    return {"val_loss": loss, "budgets": [*budgets, whole], **found}


def _model(directory: Path) -> Any:
    return load_model(directory).to(default_device()).eval()


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


def _train_branches(
    directory: Path, config: RunConfig, comparison: Comparison
) -> tuple[list[tuple[Branch, str]], int]:
    """The run of every budget and why it diverged, if it did; and the signal that stopped one, or 0."""
    trained: list[tuple[Branch, str]] = []
    for branch in branches(config, comparison.budgets):
        place, problem = branch.directory(directory), ""
        try:
            outcome = train(branch.config, place, resume=True, quiet=True, start=branch.checkpoint(directory))
        except Diverged as diverged:
            problem = str(diverged)
        else:
            if outcome.signal:
                return [], outcome.signal
        trained.append((branch, problem))
    return trained, 0


def _at_budget(
    branch: Branch, problem: str, directory: Path, config: RunConfig, comparison: Comparison
) -> dict[str, Any]:
    if problem:
        return {"tokens": branch.tokens, "loss": None, "error": problem}
    loss = _final_loss(branch.directory(directory), config, comparison)
    return {"tokens": branch.tokens, "loss": loss}


def _final_loss(directory: Path, config: RunConfig, comparison: Comparison) -> float | None:
    """Loss of a run's last weights on the sample of the validation split that all runs share."""
    rows = -(-comparison.validation_tokens // config.data.sequence)
    loss = validation_loss(_model(directory), open_feed(config, World()).batches, rows)
    return loss if math.isfinite(loss) else None


def _task_scores(job: Job, comparison: Comparison, model: Any) -> dict[str, Any]:
    assert job.task is not None
    task = build_task(job.task, **comparison.probe.data.task_options)
    lengths = [factor * task.length for factor in comparison.task_factors]
    found = score(model, task, samples=comparison.task_samples, lengths=lengths)
    return {"task": job.task, "scores": [asdict(each) | {"task": job.task} for each in found]}


def _language(directory: Path, config: RunConfig, comparison: Comparison, model: Any) -> dict[str, Any]:
    place = open_feed(config, World()).directory
    assert place is not None
    lines = read_metrics(directory)
    training = [line for line in lines if line["kind"] == "train"]
    steps = [config.tokens_per_step / line["tokens_per_second"] for line in training]
    found = evaluate_language(
        model, open_dataset(place), config.data.sequence, tokens=comparison.evaluation_tokens
    )
    _draw(directory, model.cpu(), place)
    return {
        "parameters": model.parameter_count(),
        "train_length": config.data.sequence,
        "tokens_per_second": config.tokens_per_step / statistics.median(steps),
        "peak_memory_bytes": max(line["memory_bytes"] for line in training),
        "seconds": sum(steps) * config.log.every,
        **found,
    }


def _draw(directory: Path, model: Any, dataset: Path) -> None:
    """The encoding's picture on the first words of the validation text."""
    data, words = open_dataset(dataset), load_tokenizer(dataset)
    shard = data.manifest.of("val")[0]
    tokens = torch.from_numpy(data.read(shard, 0, min(PICTURE_TOKENS, shard.tokens)))
    drawn = picture(model, tokens[None], [words.decode([token]) for token in tokens.tolist()])
    write_text(directory / PICTURE, json.dumps(drawn))


def _write(directory: Path, result: dict[str, Any]) -> None:
    write_json(directory / EVALUATION, result)
