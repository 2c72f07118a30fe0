"""The ranking: one row for each arm, best validation loss first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .results import Arm, Results
from .statistics import Summary, paired_difference, summarize


@dataclass(frozen=True)
class Row:
    """An arm's summaries over seeds; None where nothing was measured."""

    label: str
    losses: Mapping[int, float]
    val_loss: Summary | None
    behind: Summary | None
    long_loss: Summary | None
    growth: Summary | None
    solved: Mapping[int, float]
    tasks: Summary | None
    speed: Summary | None
    memory: Summary | None
    status: str


def ranking(results: Results) -> list[Row]:
    """Rows by validation loss; without one, by the share of tasks solved."""
    arms = sorted(results.arms, key=lambda arm: (_mean_loss(arm), -_mean_solved(arm)))
    best = arms[0].values(lambda run: run.val_loss) if arms else {}
    return [_row(arm, best, results) for arm in arms]


def _mean_loss(arm: Arm) -> float:
    summary = summarize(list(arm.values(lambda run: run.val_loss).values()))
    return float("inf") if summary is None else summary.mean


def _mean_solved(arm: Arm) -> float:
    summary = summarize(list(task_scores(arm).values()))
    return -1.0 if summary is None else summary.mean


def _row(arm: Arm, best: Mapping[int, float], results: Results) -> Row:
    losses = arm.values(lambda run: run.val_loss)
    long, short = results.longest or 0, results.train_length or 0
    far, near = (arm.values(lambda run, n=n: run.loss_at(n)) for n in (long, short))  # type: ignore[misc]
    return Row(
        label=arm.label,
        losses=losses,
        val_loss=summarize(list(losses.values())),
        behind=paired_difference(losses, best) if losses != best else None,
        long_loss=summarize(list(far.values())),
        growth=paired_difference(far, near),
        solved=task_scores(arm),
        tasks=summarize(list(task_scores(arm).values())),
        speed=summarize(list(arm.values(lambda run: run.tokens_per_second).values())),
        memory=summarize(list(arm.values(lambda run: run.peak_memory_bytes).values())),
        status=_status(arm),
    )


def task_scores(arm: Arm) -> dict[int, float]:
    """Seed to the mean exact-match score: over lengths and splits within a task, then over tasks."""
    out = {}
    for seed in {score.seed for score in arm.scores}:
        by_task: dict[str, list[float]] = {}
        for score in arm.scores:
            if score.seed == seed and score.exact is not None:
                by_task.setdefault(score.task, []).append(score.exact)
        means = [sum(each) / len(each) for each in by_task.values()]
        if means:
            out[seed] = sum(means) / len(means)
    return out


def _status(arm: Arm) -> str:
    """Empty when every seed is there."""
    total = len(arm.language)
    diverged = sum(run.diverged for run in arm.language.values())
    missing = sum(not run.evaluated for run in arm.language.values())
    said = [f"{n} of {total} {what}" for n, what in ((diverged, "diverged"), (missing, "not done")) if n]
    return ", ".join(said)
