"""The ranking: one row for each arm, best validation loss first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .results import Arm, Results
from .statistics import Blocks, Summary, blocks, summarize


@dataclass(frozen=True)
class Row:
    """An arm's summaries over seeds; None where nothing was measured.

    `val_loss` is over the seeds that all compared arms have, `behind` the difference to the best.
    """

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


def loss_blocks(results: Results) -> Blocks:
    """Validation losses compared seed by seed: arms of the first recipe of which no run diverged."""
    return blocks({arm.label: losses for arm in results.arms if _sound(arm) and (losses := _losses(arm))})


def task_blocks(results: Results) -> Blocks:
    """The share of tasks solved, compared seed by seed."""
    found = {arm.label: task_scores(arm) for arm in results.arms if arm.recipe == 0}
    return blocks({label: scores for label, scores in found.items() if scores})


def _sound(arm: Arm) -> bool:
    return arm.recipe == 0 and not any(run.diverged for run in arm.language.values())


def _losses(arm: Arm) -> dict[int, float]:
    return arm.values(lambda run: run.val_loss)


def ranking(results: Results) -> list[Row]:
    """Rows by validation loss, those that cannot be compared last; without a loss, by tasks solved."""
    found = loss_blocks(results)
    rows = [_row(arm, found, results) for arm in results.arms]
    rows.sort(
        key=lambda row: (row.label not in found.means, _mean_of(row.val_loss), -_mean_of(row.tasks, -1.0))
    )
    best = rows[0].label if rows and rows[0].label in found.means else None
    return [
        replace(row, behind=found.difference(row.label, best))
        if best is not None and row.label != best and row.label in found.means
        else row
        for row in rows
    ]


def _mean_of(summary: Summary | None, missing: float = float("inf")) -> float:
    return missing if summary is None else summary.mean


def _row(arm: Arm, found: Blocks, results: Results) -> Row:
    losses = _losses(arm)
    compared = [losses[seed] for seed in found.seeds] if arm.label in found.means else list(losses.values())
    long, short = results.longest or 0, results.train_length or 0
    far, near = (arm.values(lambda run, n=n: run.loss_at(n)) for n in (long, short))  # type: ignore[misc]
    return Row(
        label=arm.label,
        losses=losses,
        val_loss=summarize(compared),
        behind=None,
        long_loss=summarize(list(far.values())),
        growth=summarize([far[seed] - near[seed] for seed in far if seed in near]),
        solved=task_scores(arm),
        tasks=summarize(list(task_scores(arm).values())),
        speed=summarize(list(arm.values(lambda run: run.tokens_per_second).values())),
        memory=summarize(list(arm.values(lambda run: run.peak_memory_bytes).values())),
        status=_status(arm, len(losses) - len(compared)),
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


def _status(arm: Arm, left_out: int) -> str:
    """Empty when every seed is there and compared."""
    total = len(arm.language)
    diverged = sum(run.diverged for run in arm.language.values())
    missing = sum(not run.evaluated for run in arm.language.values())
    counts = ((diverged, "diverged"), (missing, "not done"), (left_out, "of a seed that others lack"))
    said = [f"{n} of {total} {what}" for n, what in counts if n]
    return ", ".join(said)
