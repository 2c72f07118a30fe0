"""What is compared with what, and the ranking: one row for each arm, best validation loss first.

Arms are compared if they belong to the first recipe and no run of theirs diverged, and on the seeds they all have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from .results import ArmResults, Results
from .statistics import Blocks, Summary, blocks, summarize
from .stored import Evaluation, Score

Kind = Literal["exact", "token"]
#: a score below this for every run, or as near to 1, does not tell arms apart
FLOOR = 0.02


@dataclass(frozen=True)
class Row:
    """An arm's summaries over seeds; None where nothing was measured.

    Losses and tasks are over the seeds that all compared arms have; `behind` is the difference to the best.
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


def _compared(results: Results) -> list[ArmResults]:
    return [arm for arm in results.arms if arm.recipe == 0 and not arm.diverged]


def _blocks(results: Results, of: Callable[[Evaluation], float | None]) -> Blocks:
    """A value of each run, compared seed by seed."""
    return blocks({arm.label: found for arm in _compared(results) if (found := arm.values(of))})


def loss_blocks(results: Results) -> Blocks:
    """Validation losses, seed by seed."""
    return _blocks(results, lambda run: run.val_loss)


def length_blocks(results: Results, length: int, window: int | None = None) -> Blocks:
    """Losses at one length, seed by seed: would other training runs say the same about this text?"""
    return _blocks(results, lambda run: run.loss_at(length, window))


def text_blocks(results: Results, length: int, window: int | None = None) -> Blocks:
    """Losses at one length, stretch by stretch: would these models say the same about other text?"""
    seeds = length_blocks(results, length, window).units
    found: dict[str, dict[int, float]] = {}
    for arm in _compared(results):
        entries = [each.at(length, window) for seed, each in arm.evaluations.items() if seed in seeds]
        texts = [entry.stretches for entry in entries if entry is not None]
        if seeds and len(texts) == len(seeds) and len({len(text) for text in texts}) == 1:
            columns = enumerate(zip(*texts, strict=True))
            found[arm.label] = {i: sum(x) / len(x) for i, x in columns if all(v is not None for v in x)}  # type: ignore[arg-type]
    found = {label: each for label, each in found.items() if each}
    same_text = len({max(each) for each in found.values()}) == 1
    return blocks(found, pooled=False) if same_text else Blocks((), {})


def _budgets(run: Evaluation) -> dict[int, float | None]:
    return {each.tokens: each.loss for each in run.budgets}


def diverged_at(arm: ArmResults, tokens: int) -> bool:
    """Whether a run of this arm ended without a loss at this budget."""
    found = [_budgets(run) for run in arm.evaluations.values()]
    return any(tokens in each and each[tokens] is None for each in found)


def budget_blocks(results: Results) -> dict[int, Blocks]:
    """Losses after each number of tokens, seed by seed; empty with fewer than two budgets."""
    out: dict[int, Blocks] = {}
    for n in sorted({n for run in results.evaluations for n in _budgets(run)}):
        sound = [arm for arm in results.arms if not diverged_at(arm, n)]
        found = _blocks(replace(results, arms=tuple(sound)), lambda run, n=n: _budgets(run).get(n))  # type: ignore[misc]
        out |= {n: found} if found.means else {}
    return out if len(out) > 1 else {}


def trend_blocks(results: Results) -> Blocks:
    """How much loss each arm gained (positive) from the first budget to the last, seed by seed.

    The difference of two arms is the change of the gap between them.
    """
    tokens = list(budget_blocks(results))
    if not tokens:
        return Blocks((), {})

    def change(run: Evaluation) -> float | None:
        first, last = (_budgets(run).get(n) for n in (tokens[0], tokens[-1]))
        return None if first is None or last is None else last - first

    sound = [arm for arm in results.arms if not any(diverged_at(arm, n) for n in (tokens[0], tokens[-1]))]
    return _blocks(replace(results, arms=tuple(sound)), change)


def task_blocks(results: Results) -> Blocks:
    """Task scores, compared seed by seed."""
    found = {arm.label: task_scores(results, arm) for arm in results.arms if arm.recipe == 0}
    return blocks({label: scores for label, scores in found.items() if scores})


def scored_by(results: Results, task: str) -> Kind:
    """The score that tells runs apart: samples solved exactly, unless that is near 0 or near 1 for all of them."""
    for kind in ("exact", "token"):
        means = [
            _mean(_of_task(scores, task), kind) for arm in results.arms for scores in arm.scores.values()
        ]
        known = [mean for mean in means if mean is not None]
        if known and max(known) > FLOOR and min(known) < 1 - FLOOR:
            return kind
    return "exact"


def _of_task(scores: tuple[Score, ...], task: str) -> list[Score]:
    return [score for score in scores if score.task == task]


def _mean(scores: list[Score], kind: Kind) -> float | None:
    values = [value for score in scores if (value := getattr(score, kind)) is not None]
    return sum(values) / len(values) if values else None


def task_scores(results: Results, arm: ArmResults) -> dict[int, float]:
    """Seed to the mean score: over lengths and splits within a task, then over tasks."""
    kinds = {task: scored_by(results, task) for task in results.tasks}
    out = {}
    for seed, scores in arm.scores.items():
        means = [_mean(_of_task(scores, task), kind) for task, kind in kinds.items()]
        known = [mean for mean in means if mean is not None]
        if known:
            out[seed] = sum(known) / len(known)
    return out


def ranking(results: Results) -> list[Row]:
    """Rows by validation loss, those that cannot be compared last; without a loss, by tasks solved."""
    found = loss_blocks(results)
    far = length_blocks(results, results.longest) if results.longest else Blocks((), {})
    tasks = task_blocks(results)
    rows = [_row(results, arm, found, far, tasks) for arm in results.arms]
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


def _row(results: Results, arm: ArmResults, found: Blocks, far: Blocks, tasks: Blocks) -> Row:
    def over(values: Mapping[int, float], among: Blocks) -> Summary | None:
        """On the compared seeds; on its own for an arm that is not compared."""
        seeds = among.units if arm.label in among.means else values
        return summarize([values[seed] for seed in seeds])

    losses, solved = arm.values(lambda run: run.val_loss), task_scores(results, arm)
    long = arm.values(lambda run: run.loss_at(results.longest or 0))
    short = arm.values(lambda run: run.loss_at(results.train_length or 0))
    val_loss = over(losses, found)
    return Row(
        label=arm.label,
        losses=losses,
        val_loss=val_loss,
        behind=None,
        long_loss=over(long, far),
        growth=over({s: long[s] - short[s] for s in long if s in short}, far)
        if long.keys() <= short.keys()
        else None,
        solved=solved,
        tasks=over(solved, tasks),
        speed=summarize(list(arm.values(lambda run: run.tokens_per_second).values())),
        memory=summarize(list(arm.values(lambda run: run.peak_memory_bytes).values())),
        status=_status(arm, len(losses) - (val_loss.count if val_loss else 0)),
    )


def _status(arm: ArmResults, left_out: int) -> str:
    """Empty when every seed is there and compared."""
    counts = (
        (arm.diverged, "diverged"),
        (arm.missing, "not done"),
        (left_out, "of a seed that others lack"),
    )
    return ", ".join(f"{n} of {len(arm.language)} {what}" for n, what in counts if n)
